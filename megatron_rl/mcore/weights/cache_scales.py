"""The scales of an engine's E4M3 cache (`precision.kv = "e4m3_per_layer"`): of each layer's keys and values, parts of a policy version.

They are buffers of the trainer's model, kept in checkpoints and synced like a weight. Every rank has the same: tensor-parallel ranks see
other heads, data- and context-parallel ranks other tokens. A version's scales come from what the training passes of the version before
saw, the first version's from a pass over random tokens; between two syncs they never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_rl.mcore.layers.attention.core_attention import CoreAttention
from megatron_rl.mcore.names import ModelChunks, get_model_chunks, global_name
from megatron_rl.precision.kv_cache import choose_scales


def collect_scales(model: ModelChunks) -> dict[str, torch.Tensor]:
    """Return this rank's scales, float32 [2] each, by global name; {} where there are none."""
    return {
        global_name(chunk, f"{name}.kv_scales"): module.kv_scales
        for chunk in get_model_chunks(model)
        for name, module in chunk.named_modules()
        if isinstance(module, CoreAttention) and module.kv_scales is not None
    }


@contextmanager
def renew_scales(model: ModelChunks) -> Iterator[None]:
    """At the end, choose scales for the keys and values of all forward passes within the context, on whatever ranks. Collective."""
    cores = [module for chunk in get_model_chunks(model) for module in chunk.modules() if isinstance(module, CoreAttention)]
    scales = {core: core.kv_scales for core in cores if core.kv_scales is not None}
    amax = {core: torch.zeros_like(values) for core, values in scales.items()}
    for core in scales:
        core.kv_amax = amax[core]
    try:
        yield
        if scales:
            _choose(scales, amax)
    finally:
        for core in scales:
            core.kv_amax = None


def _choose(scales: dict[CoreAttention, torch.Tensor], amax: dict[CoreAttention, torch.Tensor]) -> None:
    core = next(iter(scales))
    of_all = amax[core].new_zeros(core.config.num_layers, 2)  # of all stages' layers, so that one reduction is enough
    for core, seen in amax.items():
        of_all[core.layer_number - 1] = seen
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
    for core, values in scales.items():
        values.copy_(choose_scales(of_all[core.layer_number - 1], values))
