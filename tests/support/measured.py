"""What real Megatron models hold, in bytes, measured in the ranks of a `World`, for the planner to be held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import PrecisionConfig
from megatron_rl.mcore.layers.fp8_linear import find_fp8_layers
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout
from support.built import load_model_chunks
from support.trainer import Trainer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def held(folder: Path, precision: dict[str, Any], layout: Layout, sharded: bool) -> dict[str, int]:
    """Bytes of this rank's model, gradients and optimizer, by the names of `megatron_rl.planner.memory.RankMemory`."""
    chunks = load_model_chunks(folder, PrecisionContract.from_config(PrecisionConfig(**precision)), layout)
    layers = [layer for chunk in chunks for layer in find_fp8_layers(chunk).values()]
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    wrapped = [DistributedDataParallel(chunk.config, how, chunk) for chunk in chunks]
    config = chunks[0].config
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=config.bf16, params_dtype=config.params_dtype, use_distributed_optimizer=sharded
    )
    optimizer = get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=False)
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]
    for part in parts:
        part.init_state_fn(part.optimizer, part.config)
    masters = "shard_fp32_from_float16_groups" if sharded else "fp32_from_float16_groups"
    return {
        "weights": _bytes(tensor for chunk in chunks for tensor in (*chunk.parameters(), *_router_buffers(chunk))),
        "blocks": _bytes(tensor for layer in layers for tensor in layer.blocks),
        "operands": _bytes(layer.operand.of(torch.float32) for layer in layers),
        "gradients": _bytes(buffer.grad_data for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)),
        "masters": _bytes(tensor for part in parts for group in getattr(part, masters, []) for tensor in group),
        "moments": _bytes(state[kind] for part in parts for state in part.optimizer.state.values() for kind in _MOMENTS),
    }


def saved(folder: Path, precision: dict[str, Any], layout: Layout, lengths: list[int]) -> list[int]:
    """Bytes that the forward pass of each decoder layer keeps for the backward pass; parameters apart. One micro-batch of sequences
    with `lengths` places."""
    actor = Trainer(folder, precision, {"micro_batch_tokens": sum(lengths)}, layout=layout).actor
    sequences = [TrainingSample([1] * length, [2]) for length in lengths]
    (batch,) = actor.make_micro_batches(sequences)
    kept = [_Kept(actor.model) for _ in actor.model.decoder.layers]
    for layer, found in zip(actor.model.decoder.layers, kept, strict=True):
        layer.register_forward_pre_hook(lambda *_, found=found: found.begin())
        layer.register_forward_hook(lambda *_, found=found: found.end())
    actor.forward(batch)
    return [found.bytes for found in kept]


class _Kept:
    """The storages that autograd keeps between `begin` and `end`, each counted once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._found: dict[int, torch.Tensor] = {}  # alive, so that no address is used twice
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def begin(self) -> None:
        self._hooks.__enter__()

    def end(self) -> None:
        self._hooks.__exit__(None, None, None)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._known:
            self._found[address] = tensor
        return tensor


def _router_buffers(chunk: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor for name, tensor in chunk.named_buffers() if ".router." in name]


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
