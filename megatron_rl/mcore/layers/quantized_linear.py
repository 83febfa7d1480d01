"""Megatron's column- and row-parallel linear layers computing with quantized weights, in unified FP8 say.

A layer holds three tensors: `weight`, the FP32 master that the optimizer steps; `blocks`, the bytes and scales that `quantize()`
makes from it once per optimizer step; and `operand`, the blocks in the form of the backend. Forward and backward never read the values
of `weight`, so the engine gets what the trainer computes with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

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
from megatron_rl.precision.backends.base import Backend, Operand
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import dequantize, quantize
from parallel.digest import digest
from parallel.formats import TensorFormat
from parallel.shards import Rect


class WeightLayer(Protocol):
    """What every layer with a weight says of it, quantized or not; `mcore.load_weights.set_formats` tells it Megatron's own layers."""

    weight: torch.nn.Parameter
    format: TensorFormat
    """What the layer computes with."""
    engine_format: TensorFormat | None
    """What the engine computes with, of the roles that a mode may quantize; None for other weights."""
    is_cut_by_columns: bool
    """Ranks of `tp_group` hold other columns of the weight's rows."""
    blocks: QuantizedWeight | None
    """None where it computes with `weight` itself."""
    row_order: torch.Tensor | None
    """int64 [N]: row i of the weight's blocks is row `row_order[i]` of `weight`, where the weight's own order would mix tensors of the
    checkpoint within a block (`parallel.megatron_shards.compute_row_order`); None for the same order."""
    tp_group: Any


def gather_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-gather the sequence dimension: [s / tp, b, h] -> [s, b, h]. An input's groups lie along h, so they are unaffected."""
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _flatten_tokens(x: torch.Tensor) -> torch.Tensor:
    """[..., h] -> [T, h]."""
    return x.reshape(-1, x.shape[-1])


class QuantizedMatmul(torch.autograd.Function):
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


def _weight_gradient(weight: Any, backend: Backend, dy: Operand, x: Operand) -> torch.Tensor:
    """Compute WGrad and add it to Megatron's gradient buffer where there is one (its fused-accumulation protocol)."""
    into = getattr(weight, "main_grad", None)
    dw = backend.wgrad(dy, x, into)
    if into is None:
        return dw
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)  # never read: DDP's hook sees the flag and drops it


class QuantizedLinear:
    """Base of the quantized layers, a `WeightLayer`. `config.linear_format` and `config.linear_backend` come from `model.build_model`."""

    weight: torch.nn.Parameter
    blocks: QuantizedWeight
    config: TransformerConfig
    format: TensorFormat
    engine_format: TensorFormat | None = None
    is_cut_by_columns: bool = False
    row_order: torch.Tensor | None = None
    cached_operand: Any = None
    quantizes_input: bool = True
    quantization_enabled: bool = True
    """False within `disable_quantization`: the forward pass multiplies with the master."""
    adopted_master: str = ""
    """Digest of the master that a checkpoint's `blocks` belong to; "" for blocks that `quantize` made."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=_with_master_dtype(config), **kwargs)  # type: ignore[call-arg]
        self.format = config.linear_format

    def adopt(self, blocks: QuantizedWeight, masters: torch.Tensor | None = None) -> None:
        """Use a checkpoint's blocks, byte for byte, and set the master to their values, or to `masters` float32 [N, K]. Rows are in
        quantized order."""
        self.blocks = blocks
        with torch.no_grad():
            rows = slice(None) if self.row_order is None else self.row_order
            self.weight[rows] = dequantize(blocks, self.format) if masters is None else masters
        self.adopted_master = self._hash_master()

    def _hash_master(self) -> str:
        return digest(self.weight.detach(), Rect(0, 0, *self.weight.shape))

    def quantize(self, name: str) -> None:
        """Make `blocks` from the master; call once per optimizer step. Raise RunError naming the weight where it holds inf or NaN.

        Adopted blocks stay while the master is as it was then, which the first optimizer step ends.
        """
        if self.adopted_master and self._hash_master() != self.adopted_master:
            self.adopted_master = ""
        try:
            if not self.adopted_master:
                self.blocks = quantize(reorder_rows(self.weight.detach(), self.row_order), self.format)
        except ValueError as error:
            raise RunError(f"{name}: {error}; the step is stopped before it reaches the engine") from error
        self.cached_operand = None

    @property
    def backend(self) -> Backend:
        """The backend that computes the products."""
        return make_backend(self.config.linear_backend, self.format)

    @property
    def operand(self) -> Any:
        """The blocks in the form of the backend, made on first use: a model that only feeds an engine needs none."""
        if self.cached_operand is None:
            self.cached_operand = self.backend.prepare(self.blocks, self.row_order)
        return self.cached_operand

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        sequence_parallel, group = options["sequence_parallel"], options["tp_group"]
        if self.quantization_enabled:
            y = QuantizedMatmul.apply(input, weight, self, options["allreduce_dgrad"], sequence_parallel, group)
        else:
            inputs = gather_sequence(input, group) if sequence_parallel else input
            y = F.linear(inputs, weight.to(inputs.dtype))
        bias = options.get("bias")
        return y if bias is None else y + bias


def reorder_rows(weight: torch.Tensor, row_order: torch.Tensor | None) -> torch.Tensor:
    """Return the weight's rows in the order in which they are quantized."""
    return weight if row_order is None else weight[row_order]


def _with_master_dtype(config: TransformerConfig) -> TransformerConfig:
    """Return a copy with FP32 parameters: a quantized layer's parameter is the master itself, never rounded to bf16."""
    config = copy.copy(config)
    config.params_dtype = torch.float32
    return config


class QuantizedColumnParallelLinear(QuantizedLinear, ColumnParallelLinear):
    """y = x W^T with W's rows split over tensor-parallel ranks; `weight` float32 [N / tp, K]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        if self.bias is not None:  # of q, k and v: not quantized, so it has no FP32 master
            self.bias.data = self.bias.data.to(config.params_dtype)


class _SubstituteBlockValues(torch.autograd.Function):
    """Replaces the master by the blocks' values and passes their gradient to the master."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, dw: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dw.float(), None


class WeightOnlyQuantizedLinear(QuantizedColumnParallelLinear):
    """Multiplies the blocks' values with an input that is not quantized: MLA's kv_b, whose weight the engine absorbs into the attention,
    where no activation is quantized."""

    quantizes_input = False

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not self.quantization_enabled:
            return super()._forward_impl(input, weight, *args, **options)
        values = dequantize(self.blocks, self.format).to(input.dtype)
        return ColumnParallelLinear._forward_impl(self, input, _SubstituteBlockValues.apply(weight, values), *args, **options)


class QuantizedRowParallelLinear(QuantizedLinear, RowParallelLinear):
    """y = sum over ranks of x_r W_r^T with W's columns split over tensor-parallel ranks; `weight` float32 [N, K / tp]."""


class QuantizedReplicatedLinear(QuantizedLinear, ReplicatedLinear):
    """y = x W^T with the whole W on every tensor-parallel rank; `weight` float32 [N, K]."""


def find_quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    """Return name -> layer for every quantized linear of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def quantize_model(model: ModelChunks) -> None:
    """Make the blocks of every quantized linear of a model from its master: once after loading, once per optimizer step. Collective: raise
    RunError that names a weight with inf or NaN on every rank."""
    with errors_on_all_ranks():
        for chunk in get_model_chunks(model):
            for name, layer in find_quantized_layers(chunk).items():
                layer.quantize(global_name(chunk, f"{name}.weight"))


@contextmanager
def disable_quantization(model: ModelChunks) -> Iterator[None]:
    """Within the context, forward passes compute with the masters, to measure the effect of quantization. No gradient."""
    layers = [layer for chunk in get_model_chunks(model) for layer in find_quantized_layers(chunk).values()]
    for layer in layers:
        layer.quantization_enabled = False
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.quantization_enabled = True
