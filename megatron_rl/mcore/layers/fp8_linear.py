"""Megatron's column- and row-parallel linear layers computing in unified FP8.

A layer holds three tensors: `weight`, the FP32 master that the optimizer steps; `blocks`, the E4M3 bytes and scales that `quantize()`
makes from it once per optimizer step; and `operand`, the blocks in the form of the backend. Forward and backward never read the values
of `weight`, so the engine gets what the trainer computes with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron_rl.distributed import errors_on_all_ranks
from megatron_rl.errors import RunError
from megatron_rl.mcore.layers.mla import ReplicatedLinear
from megatron_rl.mcore.names import ModelChunks, get_model_chunks, global_name
from megatron_rl.precision.backends import make_backend
from megatron_rl.precision.backends.base import Fp8Backend, Operand
from megatron_rl.precision.fp8 import Fp8Weight, dequantize_weight, quantize_weight


def gather_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-gather the sequence dimension: [s / tp, b, h] -> [s, b, h]. Groups of 128 lie along h, so blocks are unaffected."""
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _flatten_tokens(x: torch.Tensor) -> torch.Tensor:
    """[..., h] -> [T, h]."""
    return x.reshape(-1, x.shape[-1])


class FP8Matmul(torch.autograd.Function):
    """The three products with Megatron's tensor- and sequence-parallel communication around them.

    For the backward pass WGrad's operand of x is saved, which is smaller than x where the backend quantizes it; under sequence
    parallelism this rank's part of x is saved and gathered again, as Megatron does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Any, sum_dgrad: bool, sequence_parallel: bool, group: Any
    ) -> torch.Tensor:
        inputs = gather_sequence(x, group) if sequence_parallel else x
        operand = layer.backend.quantize(_flatten_tokens(inputs), rows=True, columns=ctx.needs_input_grad[1] and not sequence_parallel)
        ctx.save_for_backward(weight, *((x,) if sequence_parallel else operand.columns))
        ctx.layer, ctx.sum_dgrad, ctx.sequence_parallel, ctx.group, ctx.shape = layer, sum_dgrad, sequence_parallel, group, x.shape
        return layer.backend.fprop(operand, layer.operand).unflatten(0, inputs.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        layer, group, backend = ctx.layer, ctx.group, ctx.layer.backend
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        gradient = backend.quantize(_flatten_tokens(dy), rows=needs_dx, columns=needs_dw)
        dx, dw, pending = None, None, None
        if needs_dx:
            dx = backend.dgrad(gradient, layer.operand).unflatten(0, dy.shape[:-1])
            if ctx.sum_dgrad:
                pending = dist.all_reduce(dx, group=group, async_op=True)
            elif ctx.sequence_parallel:
                full, dx = dx.contiguous(), dx.new_empty(ctx.shape)
                pending = dist.reduce_scatter_tensor(dx, full, group=group, async_op=True)
        if needs_dw:
            if ctx.sequence_parallel:
                operand = backend.quantize(_flatten_tokens(gather_sequence(saved[0], group)), rows=False, columns=True)
            else:
                operand = Operand(gradient.tokens, columns=tuple(saved))
            dw = _weight_gradient(weight, backend, gradient, operand)
        if pending is not None:
            pending.wait()
        return dx, dw, None, None, None, None


def _weight_gradient(weight: Any, backend: Fp8Backend, dy: Operand, x: Operand) -> torch.Tensor:
    """Compute WGrad and add it to Megatron's gradient buffer where there is one (its fused-accumulation protocol)."""
    into = getattr(weight, "main_grad", None)
    dw = backend.wgrad(dy, x, into)
    if into is None:
        return dw
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)  # never read: DDP's hook sees the flag and drops it


class _FP8Linear:
    """Base of the FP8 layers. `config.fp8_scale_format` and `config.fp8_backend` come from `model.build_model`."""

    weight: torch.nn.Parameter
    blocks: Fp8Weight
    config: TransformerConfig
    scale_format: str
    cached_operand: Any = None
    quantizes_input: bool = True
    fp8_enabled: bool = True
    """False within `disable_fp8`: the forward pass multiplies with the master."""
    row_order: torch.Tensor | None = None
    """int64 [N]: row i of `blocks` is row `row_order[i]` of `weight`, where the weight's own order would mix tensors of the checkpoint
    within a block (`parallel.megatron_shards.compute_row_order`); None for the same order."""
    adopted: bool = False
    """`blocks` come from a checkpoint rather than from `quantize`."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=_with_master_dtype(config), **kwargs)  # type: ignore[call-arg]
        self.scale_format = config.fp8_scale_format

    def adopt(self, blocks: Fp8Weight) -> None:
        """Use a checkpoint's blocks, rows in quantized order, byte for byte, and set the master to their values."""
        self.blocks, self.adopted = blocks, True
        with torch.no_grad():
            rows = slice(None) if self.row_order is None else self.row_order
            self.weight[rows] = dequantize_weight(blocks)

    def quantize(self, name: str) -> None:
        """Make `blocks` from the master; call once per optimizer step. Raise RunError naming the weight where it holds inf or NaN.

        Adopted blocks stay while the master equals their values, which the first optimizer step ends.
        """
        ordered = reorder_rows(self.weight.detach(), self.row_order)
        self.adopted = self.adopted and torch.equal(ordered, dequantize_weight(self.blocks))
        try:
            if not self.adopted:
                self.blocks = quantize_weight(ordered, self.scale_format)
        except ValueError as error:
            raise RunError(f"{name}: {error}; the step is stopped before it reaches the engine") from error
        self.cached_operand = None

    @property
    def backend(self) -> Fp8Backend:
        """The backend that computes the products."""
        return make_backend(self.config.fp8_backend, self.scale_format)

    @property
    def operand(self) -> Any:
        """The blocks in the form of the backend, made on first use: a model that only feeds an engine needs none."""
        if self.cached_operand is None:
            self.cached_operand = self.backend.prepare(self.blocks, self.row_order)
        return self.cached_operand

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        sequence_parallel, group = options["sequence_parallel"], options["tp_group"]
        if self.fp8_enabled:
            y = FP8Matmul.apply(input, weight, self, options["allreduce_dgrad"], sequence_parallel, group)
        else:
            inputs = gather_sequence(input, group) if sequence_parallel else input
            y = F.linear(inputs, weight.to(inputs.dtype))
        bias = options.get("bias")
        return y if bias is None else y + bias


def reorder_rows(weight: torch.Tensor, row_order: torch.Tensor | None) -> torch.Tensor:
    """Return the weight's rows in the order in which they are quantized."""
    return weight if row_order is None else weight[row_order]


def _with_master_dtype(config: TransformerConfig) -> TransformerConfig:
    """Return a copy with FP32 parameters: an FP8 layer's parameter is the master itself, never rounded to bf16."""
    config = copy.copy(config)
    config.params_dtype = torch.float32
    return config


class FP8ColumnParallelLinear(_FP8Linear, ColumnParallelLinear):
    """y = x W^T with W's rows split over tensor-parallel ranks; `weight` float32 [N / tp, K]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        if self.bias is not None:  # of q, k and v: not FP8, so it has no FP32 master
            self.bias.data = self.bias.data.to(config.params_dtype)


class _SubstituteBlockValues(torch.autograd.Function):
    """Replaces the master by the blocks' values and passes their gradient to the master."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, dw: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dw.float(), None


class FP8WeightOnlyColumnParallelLinear(FP8ColumnParallelLinear):
    """Multiplies the blocks' values with an input that is not quantized: MLA's kv_b, whose weight the engine absorbs into the attention,
    where no activation is quantized."""

    quantizes_input = False

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not self.fp8_enabled:
            return super()._forward_impl(input, weight, *args, **options)
        values = dequantize_weight(self.blocks).to(input.dtype)
        return ColumnParallelLinear._forward_impl(self, input, _SubstituteBlockValues.apply(weight, values), *args, **options)


class FP8RowParallelLinear(_FP8Linear, RowParallelLinear):
    """y = sum over ranks of x_r W_r^T with W's columns split over tensor-parallel ranks; `weight` float32 [N, K / tp]."""


class FP8ReplicatedLinear(_FP8Linear, ReplicatedLinear):
    """y = x W^T with the whole W on every tensor-parallel rank; `weight` float32 [N, K]."""


def find_fp8_layers(model: torch.nn.Module) -> dict[str, _FP8Linear]:
    """Return name -> layer for every FP8 linear of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _FP8Linear)}


def quantize_model(model: ModelChunks) -> None:
    """Quantize every FP8 linear of a model from its master: once after loading, once per optimizer step. Collective: raise RunError that
    names a weight with inf or NaN on every rank."""
    with errors_on_all_ranks():
        for chunk in get_model_chunks(model):
            for name, layer in find_fp8_layers(chunk).items():
                layer.quantize(global_name(chunk, f"{name}.weight"))


@contextmanager
def disable_fp8(model: ModelChunks) -> Iterator[None]:
    """Within the context, forward passes compute with the masters, to measure the effect of quantization. No gradient."""
    layers = [layer for chunk in get_model_chunks(model) for layer in find_fp8_layers(chunk).values()]
    for layer in layers:
        layer.fp8_enabled = False
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.fp8_enabled = True
