"""Scales of the engine's E4M3 KV cache (`precision.kv = "e4m3_per_layer"`): one for the keys and one for the values of each layer.

They are buffers of the trainer's model, saved in checkpoints and synced like weights, equal on all ranks. A policy version's scales come
from the training passes of the previous version; the first version's come from a pass over random tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_rl.mcore.base.names import ModelChunks, get_model_chunks, global_name, iter_modules
from megatron_rl.mcore.layers.attention.core_attention import CoreAttention
from megatron_rl.precision.kv_cache import choose_scales


def collect_scales(model: ModelChunks) -> dict[str, torch.Tensor]:
    """Return this rank's KV-cache scales as {global name: float32 [2]}. Empty if there are none."""
    cores = iter_modules(model, CoreAttention)
    return {global_name(chunk, f"{name}.kv_scales"): core.kv_scales for chunk, name, core in cores if core.kv_scales is not None}


@contextmanager
def renew_scales(model: ModelChunks) -> Iterator[None]:
    """Context manager: on exit, choose new scales from the keys and values of the enclosed forward passes on all ranks. Collective."""
    scales = {core: core.kv_scales for *_, core in iter_modules(model, CoreAttention) if core.kv_scales is not None}
    amax = {core: torch.zeros_like(values) for core, values in scales.items()}
    for core in scales:
        core.kv_amax = amax[core]
    try:
        yield
        first = get_model_chunks(model)[0]
        if not first.config.scale_kv_by_layer:
            return
        device = next(first.parameters()).device
        of_all = torch.zeros(first.config.num_layers, 2, device=device)  # of all stages; a stage of gated delta nets has no scales
        for core, seen in amax.items():
            of_all[core.layer_number - 1] = seen
        dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
        for core, values in scales.items():
            values.copy_(choose_scales(of_all[core.layer_number - 1], values))
    finally:
        for core in scales:
            core.kv_amax = None
