"""Row-parallel layers of the engine with the trainer's sums: FP32 partial sums of the ranks, added by the tree of
`megatron_rl.kernels.sums.reference` and rounded once. SGLang's all-reduce adds rounded sums, in an order that depends on the ranks. Shapes
are static and nothing waits for the GPU, so CUDA graphs can capture the layers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl.kernels.linear import deep_gemm
from megatron_rl.kernels.sums import ranks
from megatron_rl.kernels.sums import reference as tree
from rollout_sglang.hooks import adapters, gpu_activation_quant, quantized_rows

REDUCTION_VARIABLE = "MEGATRON_RL_REDUCTION"  # environment variable of the engine's processes with `precision.reduction`
_LINEAR_METHODS, _EXPERT_METHODS = ("UnquantizedLinearMethod", "Fp8LinearMethod"), ("UnquantizedFusedMoEMethod", "Fp8MoEMethod")
"""SGLang's methods whose products can give partial sums: with `partial_sums` on a CPU, by `multiply_on_gpu` for linear layers on a GPU."""
PARTS_VARIABLE = "MEGATRON_RL_ROW_PARTS"  # environment variable of the engine's processes with `parallel.row_sums.count_parts`
CUT = "megatron_rl_slices"  # attribute of the scales of a row-parallel layer's weight
_partial = False
_slices = 0


@functools.cache
def sums_by_tree() -> bool:
    """Return whether the engine of this process sums by the tree."""
    return os.environ.get(REDUCTION_VARIABLE) == "tree"


@functools.cache
def sums_by_ranks() -> bool:
    """Return whether the engine of this process has the order of sums of `precision.reduction = "ranks"`."""
    return os.environ.get(REDUCTION_VARIABLE) == "ranks"


def count_parts() -> int:
    """Return the number of parts that the engine of this process adds in the order of ranks; 1 unless `precision.reduction = "ranks"`."""
    return int(os.environ.get(PARTS_VARIABLE, 1))


def count_slices(ranks: int) -> int:
    """Return the number of slices that each of `ranks` ranks multiplies alone and that this module adds; 0 if SGLang does it. On a GPU,
    its all-reduce adds one part of each rank in their order (`gpu_all_reduce`)."""
    parts = count_parts()
    return 0 if parts == 1 or (parts == ranks and torch.cuda.is_available()) else parts // ranks


def is_summed_by_tree(method: Any) -> bool:
    """Return whether a row-parallel layer with this SGLang method, or an expert's second layer, sums by the tree."""
    methods = _LINEAR_METHODS if torch.cuda.is_available() else _LINEAR_METHODS + _EXPERT_METHODS
    return sums_by_tree() and type(method).__name__ in methods


@contextmanager
def partial_sums() -> Iterator[None]:
    """Context manager in which products return float32 sums by the tree, not rounded and without a bias."""
    global _partial
    _partial = True
    try:
        yield
    finally:
        _partial = False


def wants_partial_sums() -> bool:
    return _partial


@contextmanager
def sliced_products(slices: int) -> Iterator[None]:
    """Context manager in which products on a CPU return the rounded results `[slices, T, N]` of slices of K, without a bias."""
    global _slices
    _slices = slices
    try:
        yield
    finally:
        _slices = 0


def wanted_slices() -> int:
    """Return the number of slices within `sliced_products`, else 0."""
    return _slices


def run_row_parallel(
    original: Callable[..., Any],
    self: Any,
    input_: torch.Tensor,
    skip_all_reduce: bool = False,
    forward_batch: Any = None,
    output_tensor: torch.Tensor | None = None,
) -> Any:
    """Wrap `RowParallelLinear.forward`: x `[T, K / tp]` -> (y `[T, N]`, bias that was not added). If SGLang adds up later, together with
    other layers, the first rank returns the sum and all other ranks return zeros, so that SGLang's sum is exact."""
    from sglang.srt.layers.moe.utils import should_skip_mlp_all_reduce

    slices = count_slices(self.tp_group.world_size)
    by_tree, has_adapter = is_summed_by_tree(self.quant_method), getattr(self, "has_adapter", False)
    if not by_tree and not has_adapter and not slices:
        return original(self, input_, skip_all_reduce, forward_batch, output_tensor)
    if output_tensor is not None or not self.input_is_parallel or self.use_decode_attn_tp:
        raise NotImplementedError("a row-parallel layer with its own output, split input or decode group is outside the precision contract")
    summed_later = not self.reduce_results or skip_all_reduce or should_skip_mlp_all_reduce()
    if not by_tree and not slices:
        y, bias = original(self, input_, skip_all_reduce, forward_batch)
        return adapters.add_to_rounded_sum(self, input_, y, summed_later), bias
    if torch.cuda.is_available():
        partial = multiply_on_gpu(self, input_, slices)
    else:
        with sliced_products(slices) if slices else partial_sums():
            partial = self.quant_method.apply(self, input_, bias=None)
    y = (add_slices if slices else add_over_ranks)(partial, self.tp_group, input_.dtype)
    if has_adapter:
        y = adapters.add_to_row_sum(self, input_, y, add_over_ranks)
    if self.bias is not None and not self.skip_bias_add:  # as Megatron, which adds it with the residual stream
        y = y + self.bias
    if summed_later:
        y = keep_on_first_rank(y, self.tp_group)
    return y, self.bias if self.skip_bias_add else None


def multiply_on_gpu(layer: Any, x: torch.Tensor, slices: int = 0) -> torch.Tensor:
    """Return this rank's float32 sums `[T, N]`, or the rounded results `[slices, T, N]` of slices of K, for x `[T, K / tp]`, which is
    quantized by the contract if the layer's weight is.
    `gpu_activation_quant.read_linear_scale_format` has refused layers whose weight or scales SGLang holds in another form."""
    if not isinstance(x, torch.Tensor):
        raise NotImplementedError("a row-parallel layer whose input SGLang has already quantized is outside the precision contract")
    if type(layer.quant_method).__name__ == "UnquantizedLinearMethod":
        return ranks.multiply_slices(x, layer.weight, slices) if slices else tree.multiply(x, layer.weight)
    rows = quantized_rows.take_rows(x)
    rows = gpu_activation_quant.quantize_groups(x.contiguous(), column_major_scales=True) if rows is x else rows
    if slices:
        return deep_gemm.multiply_slices(rows, (layer.weight, getattr(layer.weight_scale_inv, CUT)))
    return tree.multiply_blocks(rows, (layer.weight, layer.weight_scale_inv))


def load_model(original: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    """Wrap `ModelRunner.load_model`."""
    result = original(self, *args, **named)
    keep_cut_scales(self.model)
    return result


def keep_cut_scales(model: torch.nn.Module) -> None:
    """Copy the scales of row-parallel layers on a GPU as slices, if this module adds them, as attributes of the scales. After a sync, do so
    in place, because CUDA graphs read their address."""
    layer: Any
    for layer in model.modules() if torch.cuda.is_available() else ():
        scale = getattr(layer, "weight_scale_inv", None)
        if scale is not None and hasattr(layer, "input_is_parallel") and count_slices(layer.tp_group.world_size):
            kept = getattr(scale, CUT, None)
            setattr(scale, CUT, cut_scales(layer) if kept is None else kept.copy_(cut_scales(layer)))


def cut_scales(layer: Any) -> torch.Tensor:
    """Return the scales of a row-parallel layer as slices, computed from its `weight_scale_inv`."""
    return deep_gemm.cut_scales(layer.weight_scale_inv.detach(), count_slices(layer.tp_group.world_size))


class CapturedGroup:
    """Adapts a group of SGLang to the group and the `torch.distributed` module that `tree.reduce` takes."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def size(self) -> int:
        return self._group.world_size

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, group: CapturedGroup) -> None:
        self._group.all_gather_into_tensor(output, input)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, group: CapturedGroup) -> None:
        self._group.all_to_all_single(output, input)


def add_over_ranks(partial: torch.Tensor, group: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of float32 `[T, N]` over the ranks of an SGLang group, in `dtype`."""
    if group.world_size == 1 or not len(partial):
        return partial.to(dtype)
    if torch.cuda.is_available():
        captured = CapturedGroup(group)
        return tree.reduce(partial, captured, dtype, captured)
    return tree.reduce(partial, group.device_group, dtype)


def add_slices(partials: torch.Tensor, group: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of the parts `[slices, T, N]` of all ranks of an SGLang group in order, in their dtype."""
    if group.world_size == 1 or not partials.numel():
        return tree.add_ranks(partials)
    if torch.cuda.is_available():
        captured = CapturedGroup(group)
        return ranks.reduce(partials, captured, captured)
    return ranks.reduce(partials, group.device_group)


def keep_on_first_rank(y: torch.Tensor, group: Any) -> torch.Tensor:
    """Return y on the group's first rank and zeros on all other ranks, so that a later sum over the ranks gives y."""
    return y if group.rank_in_group == 0 else torch.zeros_like(y)
