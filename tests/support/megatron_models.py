"""Real Megatron models in any layout: their named tensors, their memory, and single FP8 layers."""

from __future__ import annotations

import gc
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer as buffers
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import PrecisionConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.checkpoint.optimizer import MOMENTS
from megatron_rl.mcore.layers.linear.quantized_linear import (
    QuantizedColumnParallelLinear,
    QuantizedRowParallelLinear,
    find_quantized_layers,
)
from megatron_rl.mcore.model import build_model
from megatron_rl.mcore.names import get_model_chunks
from megatron_rl.mcore.optim.master_slices import flatten_chained, iter_masters
from megatron_rl.mcore.optim.quantizing_optimizer import is_quantized
from megatron_rl.mcore.passes.replicas import select_own
from megatron_rl.mcore.transformer_config import QuantizedTransformerConfig
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, load_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from parallel.digest import make_stored_tensors, raw_bytes, view_rect
from parallel.formats import FP8
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect
from parallel.shards import Rect, Shard
from support.trainer import Trainer, latent_attention, negative_log_likelihood, start


def load_model_chunks(folder: Path, contract: PrecisionContract, layout: Layout) -> list[Any]:
    """Return this rank's virtual pipeline stages, built, loaded and quantized."""
    start(layout)
    hf_config = read_config(folder)
    chunks = get_model_chunks(build_model(hf_config, layout, contract))
    load_checkpoint(chunks, folder, build_rank_shards(hf_config, layout, dist.get_rank()))
    return chunks


def compare_with_checkpoint(folder: Path, layout: Layout, precision: dict[str, Any]) -> dict[str, Any]:
    """Compare this rank's named tensors with the checkpoint's own blocks.

    Returns this rank's `coordinates` by Megatron; names that are `missing`, `surplus` or `different`; the number of `scales` and of
    `fp8_layers`, and of FP8 layers that hold dequantized values already (`computed`).
    """
    hf_config, contract = read_config(folder), PrecisionContract.from_config(PrecisionConfig(**precision))
    chunks = load_model_chunks(folder, contract, layout)
    shards = build_trainer_shards(ModelGeometry.from_hf_config(hf_config), layout, format_of=contract.format_of)[dist.get_rank()]
    tensors = collect_named_tensors(chunks, build_rank_shards(hf_config, layout, dist.get_rank()), contract)
    expected = _on_the_checkpoints_grid(folder, shards, contract)
    ranks = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
        "edp": parallel_state.get_expert_data_parallel_rank(),
    }
    return {
        "coordinates": ranks,
        "missing": sorted(expected.keys() - tensors.keys()),
        "surplus": sorted(tensors.keys() - expected.keys()),
        "different": [name for name in expected.keys() & tensors.keys() if not _same_bytes(tensors[name], expected[name])],
        "scales": sum(name.endswith("_scale_inv") for name in expected),
        "fp8_layers": sum(len(find_quantized_layers(chunk)) for chunk in chunks),
        "computed": sum(layer.cached_operand is not None for chunk in chunks for layer in find_quantized_layers(chunk).values()),
    }


def _on_the_checkpoints_grid(folder: Path, shards: list[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """Quantize every tensor whole, then cut it by the geometry's regions. A trainer without FP8 has no FP32 master, so its values are
    rounded first."""
    high = getattr(torch, contract.high_format.dtype)
    expected: dict[str, torch.Tensor] = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for shard in shards:
            format = contract.format_of(shard.role)
            expected |= make_stored_tensors([shard], contract.format_of)
            for region in shard.regions:
                value = file.get_tensor(region.tensor.name)
                if format.quantized:
                    grid = quantize_weight(value if contract.trainer_format.quantized else value.to(high), contract.scale_format)
                    _copy(expected[shard.name], region.shard_rect, grid.data, region.tensor_rect)
                    _copy(
                        expected[FP8.scale_name(shard.name)],
                        get_scale_rect(region.shard_rect, format),
                        grid.scale,
                        get_scale_rect(region.tensor_rect, format),
                    )
                else:
                    _copy(expected[shard.name], region.shard_rect, value.to(expected[shard.name].dtype), region.tensor_rect)
    return expected


def _copy(target: torch.Tensor, at: Rect, source: torch.Tensor, of: Rect) -> None:
    view_rect(target, at).copy_(view_rect(source, of))


def _same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.shape == other.shape and bool((raw_bytes(tensor) == raw_bytes(other)).all())


def count_bytes(folder: Path, precision: dict[str, Any], layout: Layout, lora: LoraConfig | None) -> dict[str, int]:
    """Return the bytes of this rank's model, gradients and optimizer, by the names of `megatron_rl.planner.memory.RankMemory`."""
    actor = Trainer(folder, precision, layout=layout, lora=lora).actor
    chunks, parts, buffers = actor.chunks, flatten_chained(actor.optimizer), actor.offloader.gradient_buffers
    for part in parts:
        part.init_state_fn(part.optimizer, part.config)
    layers = [layer for chunk in chunks for layer in find_quantized_layers(chunk).values()]
    plain = [tensor for chunk in chunks for tensor in chunk.parameters() if not is_quantized(tensor)]
    return {
        "weights": _bytes([*plain, *(tensor for chunk in chunks for tensor in _router_buffers(chunk))]),
        "blocks": _bytes(tensor for layer in layers for tensor in layer.blocks),
        "operands": _bytes(layer.operand.as_dtype(torch.float32) for layer in layers),
        "gradients": _bytes(buffer.grad_data for buffer in buffers),
        "masters": _bytes(master for part in parts for _, master in iter_masters(part)),
        "moments": _bytes(state[kind] for part in parts for state in part.optimizer.state.values() for kind in MOMENTS),
    }


def count_live_bytes(folder: Path, precision: dict[str, Any], layout: Layout, batch: list[TrainingSample]) -> dict[str, float]:
    """Return the bytes per value of a quantized weight that all live tensors of a rank occupy, for a frozen model (`reference`) and for
    an actor after an optimizer step (`live`), and the bytes that its gathers received (`gathered`). Other weights and the emulation's
    operands are subtracted."""
    before = _count_storages()
    reference = load_model_chunks(folder, PrecisionContract.from_config(PrecisionConfig(**precision)), layout)
    held, count = (
        _count_storages() - before,
        sum(tensor.numel() for chunk in reference for tensor in chunk.parameters() if is_quantized(tensor)),
    )
    held -= sum(tensor.nbytes for chunk in reference for tensor in chunk.parameters() if not is_quantized(tensor))
    del reference
    before = _count_storages()
    trainer = Trainer(folder, precision, layout=layout)
    gather, received = buffers.dist_all_gather_func, []
    with mock.patch.object(
        buffers, "dist_all_gather_func", lambda into, *args, **kw: (received.append(into), gather(into, *args, **kw))[1]
    ):
        trainer.actor.update(select_own(batch), negative_log_likelihood)
    layers = [layer for chunk in trainer.actor.chunks for layer in find_quantized_layers(chunk).values()]
    for layer in layers:
        layer.cached_operand = None
    plain = sum(tensor.numel() for chunk in trainer.actor.chunks for tensor in chunk.parameters() if not is_quantized(tensor))
    others = plain * (4 + 4 + 8 / layout.dp)  # FP32 weights, their own masters, gradients and moments
    values = sum(layer.weight.numel() for layer in layers)
    moved = sum(into.numel() for into in received if into.itemsize == 1)
    return {"reference": held / count, "live": (_count_storages() - before - others) / values, "gathered": moved / values}


def _count_storages() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def count_saved_bytes(folder: Path, precision: dict[str, Any], layout: Layout, lengths: list[int]) -> list[int]:
    """Return the bytes that the forward pass of each decoder layer keeps for the backward pass, without parameters, for one micro-batch
    of sequences with these lengths. Latent attention takes its form on a GPU, for which memory is planned."""
    with latent_attention(absorbed=False):
        actor = Trainer(folder, precision, {"micro_batch_tokens": sum(lengths)}, layout=layout).actor
    sequences = [TrainingSample([1] * length, [2]) for length in lengths]
    (batch,) = actor.make_micro_batches(sequences)
    trackers = [_SavedTensors(actor.model) for _ in actor.model.decoder.layers]
    for layer, tracker in zip(actor.model.decoder.layers, trackers, strict=True):
        layer.register_forward_pre_hook(lambda *_, tracker=tracker: tracker.begin())
        layer.register_forward_hook(lambda *_, tracker=tracker: tracker.end())
    actor.forward(batch)
    return [tracker.bytes for tracker in trackers]


def measure_peak(folder: Path, precision: dict[str, Any], layout: Layout, lengths: list[int], recompute: str) -> int:
    """Return the most bytes that a training pass over one micro-batch allocates on this rank, beyond what the rank holds before and
    after."""
    options = {"micro_batch_tokens": sum(lengths), "recompute": recompute}
    with latent_attention(absorbed=False):
        actor = Trainer(folder, precision, options, layout=layout).actor
    samples = [TrainingSample([1] * length, [2]) for length in lengths]
    actor.update(samples, negative_log_likelihood)  # makes what lasts
    actor.compute_logprobs(samples)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        actor._run(samples, lambda logprobs, batch, shard, scored: -logprobs.sum(), forward_only=False)
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


class _SavedTensors:
    """Counts the storages that autograd saves between `begin` and `end`, each once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._storages: dict[int, torch.Tensor] = {}  # alive, so that no address is used twice
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def begin(self) -> None:
        self._hooks.__enter__()

    def end(self) -> None:
        self._hooks.__exit__(None, None, None)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._storages.values())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._known:
            self._storages[address] = tensor
        return tensor


def _router_buffers(chunk: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor for name, tensor in chunk.named_buffers() if ".router." in name]


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def build(kind: str, scale_format: str, sequence_parallel: bool, weight: torch.Tensor, **changes: Any) -> Any:
    """Return this rank's quantized layer of a "column" (N split over ranks) or "row" (K split) kind, with its slice of `weight` `[N,
    K]`."""
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    config = QuantizedTransformerConfig(
        num_layers=1,
        hidden_size=weight.shape[1],
        num_attention_heads=max(tp, 2),
        add_bias_linear=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        linear_format=FP8.with_scales(scale_format),
    )
    options = dict(config=config, init_method=torch.nn.init.zeros_, bias=False) | {"skip_bias_add": False} | changes
    column = kind == "column"
    make = QuantizedColumnParallelLinear if column else QuantizedRowParallelLinear
    layer = make(weight.shape[1], weight.shape[0], **options, **({"gather_output": False} if column else {"input_is_parallel": True}))
    with torch.no_grad():
        layer.quantize(weight.chunk(tp, dim=0 if column else 1)[rank])
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    return layer


def accumulate_weight_gradient(sequence_parallel: bool, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return WGrad of a column-parallel layer on this rank: `once` for all tokens, x `[s, 1, K]` and dy `[s, 1, N]`, and `added` to a
    gradient buffer in two halves. Check Megatron's protocol: the buffer is used, its flag is set, and autograd gets no gradient."""
    layer = build("column", "pow2", sequence_parallel, weight)
    tp, rank = dist.get_world_size(), dist.get_rank()

    def backward(x: torch.Tensor, dy: torch.Tensor) -> None:
        layer.weight.grad = None  # as DDP does
        own_tokens = x.chunk(tp)[rank] if sequence_parallel else x
        layer(own_tokens.clone().requires_grad_(True))[0].backward(dy.chunk(tp, dim=2)[rank].contiguous())

    backward(x, dy)
    once, layer.weight.main_grad = layer.weight.main_grad, torch.zeros(layer.weight.shape)
    for half in zip(x.chunk(2), dy.chunk(2), strict=True):
        layer.weight.grad_added_to_main_grad = False
        backward(*half)
        assert layer.weight.grad_added_to_main_grad
    return {"once": once, "added": layer.weight.main_grad}


def run_expert(kind: str, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return y, dx and dw of this rank's slice of an expert whose tokens the dispatcher has already exchanged: the layer itself must
    neither gather nor sum. x is `[T, K of the rank]`, dy is `[T, N of the rank]`."""
    layer = build(kind, "pow2", dist.get_world_size() > 1, weight, is_expert=True, skip_bias_add=True)
    x = x.clone().requires_grad_(True)
    y, _ = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.main_grad


def run_layer(kind: str, scale_format: str, sequence_parallel: bool, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> Any:
    """Return FProp, DGrad and WGrad of the whole layer, assembled from all ranks on every rank: y `[s, b, N]`, dx `[s, b, K]`, dw `[N, K]`.

    `kind` is "column" (N split over ranks) or "row" (K split). `weight` `[N, K]`, `x` `[s, b, K]` and `dy` `[s, b, N]` belong to the whole
    layer.
    """
    layer = build(kind, scale_format, sequence_parallel, weight)
    tp, rank = dist.get_world_size(), dist.get_rank()
    column = kind == "column"
    split, whole = (0, 1) if column else (1, 0)

    def part(tensor: torch.Tensor, along_features: bool) -> torch.Tensor:
        """Return this rank's part of an activation: of its features, of its sequence under sequence parallelism, or all of it."""
        if along_features:
            return tensor.chunk(tp, dim=2)[rank].contiguous()
        return tensor.chunk(tp, dim=0)[rank].contiguous() if sequence_parallel else tensor

    def joined(tensor: torch.Tensor, along_features: bool) -> torch.Tensor:
        if not along_features and not sequence_parallel:
            return tensor
        return _gather(tensor, 2 if along_features else 0)

    input_part = part(x, along_features=not column).clone().requires_grad_(True)
    y, _ = layer(input_part)
    y.backward(part(dy, along_features=column))
    assert layer.weight.shape[whole] == weight.shape[whole]
    return (
        joined(y.detach(), along_features=column),
        joined(input_part.grad, along_features=not column),
        _gather(layer.weight.main_grad, split),
    )


def _gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)
