"""Megatron's column- and row-parallel linear layers computing in unified FP8 (backend `emulated`).

A layer keeps three things: `weight`, the FP32 master that the optimizer steps; `blocks`, the E4M3 bytes and scales made from it
once per optimizer step by `quantize()`; and the blocks' dequantised values, which the emulated products multiply with. Forward and
backward never look at `weight`, so what the engine is given is what the trainer computes with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron_rl.errors import RunError
from megatron_rl.fp8 import products
from megatron_rl.fp8.quantize import Blocks, dequantize_weight, quantize_weight
from megatron_rl.mcore.latent import ReplicatedLinear
from megatron_rl.mcore.names import global_name
from megatron_rl.ranks import raise_together


def _gather_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-gathers the sequence dimension: [s / tp, b, h] -> [s, b, h]. Groups of 128 lie along h, so blocks are unaffected."""
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


class _FP8Product(torch.autograd.Function):
    """The three products with Megatron's tensor- and sequence-parallel communication around them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Any, sum_dgrad: bool, sequence_parallel: bool, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.sum_dgrad, ctx.sequence_parallel, ctx.group = layer, sum_dgrad, sequence_parallel, group
        inputs = _gather_sequence(x, group) if sequence_parallel else x
        return products.fprop(inputs, layer.block_values, layer.scale_format)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, group = ctx.layer, ctx.group
        dx = products.dgrad(dy, layer.block_values, layer.scale_format)
        pending = None
        if ctx.sum_dgrad:
            pending = dist.all_reduce(dx, group=group, async_op=True)
        elif ctx.sequence_parallel:
            full, dx = dx.contiguous(), torch.empty_like(x)
            pending = dist.reduce_scatter_tensor(dx, full, group=group, async_op=True)
        inputs = _gather_sequence(x, group) if ctx.sequence_parallel else x
        dw = products.wgrad(dy.reshape(-1, dy.shape[-1]), inputs.reshape(-1, inputs.shape[-1]), layer.scale_format)
        if pending is not None:
            pending.wait()
        return dx, _accumulate(weight, dw), None, None, None, None


def _accumulate(weight: Any, dw: torch.Tensor) -> torch.Tensor:
    """Adds the FP32 weight gradient to Megatron's gradient buffer where there is one (its fused-accumulation protocol)."""
    if not hasattr(weight, "main_grad"):
        return dw
    weight.main_grad.add_(dw)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(dw)  # never read: DDP's hook sees the flag and drops it


class _FP8Linear:
    """What both parallel layers share. `config.fp8_scale_format` comes from `model.build_model`."""

    weight: torch.nn.Parameter
    blocks: Blocks
    _block_values: torch.Tensor | None = None
    scale_format: str
    row_order: torch.Tensor | None = None
    """int64 [N]: row i of `blocks` is row `row_order[i]` of `weight`, where the weight's own order would mix tensors of the checkpoint
    within a block (`parallel.megatron.row_order`). None: the same order."""
    adopted: bool = False
    """`blocks` are a checkpoint's, not `quantize`'s."""

    def adopt(self, blocks: Blocks) -> None:
        """Takes a checkpoint's blocks, rows in quantised order, as they are; the master becomes their values."""
        self.blocks, self.adopted = blocks, True
        with torch.no_grad():
            in_rows = slice(None) if self.row_order is None else self.row_order
            self.weight[in_rows] = dequantize_weight(blocks)

    def quantize(self, name: str) -> None:
        """Makes `blocks` from the master; call once per optimizer step. Raises RunError naming the weight if it is inf or NaN.

        Adopted blocks stay for as long as the master is exactly their values, which the first optimizer step ends.
        """
        ordered = in_order(self.weight.detach(), self.row_order)
        self.adopted = self.adopted and torch.equal(ordered, dequantize_weight(self.blocks))
        try:
            if not self.adopted:
                self.blocks = quantize_weight(ordered, self.scale_format)
        except ValueError as error:
            raise RunError(f"{name}: {error}; the step is stopped before it reaches the engine") from error
        self._block_values = None

    @property
    def block_values(self) -> torch.Tensor:
        """float32 [N, K]: the blocks' values in the weight's own row order. Made when first asked for: a model that only serves an
        engine holds none."""
        if self._block_values is None:
            values = dequantize_weight(self.blocks)
            self._block_values = values if self.row_order is None else torch.empty_like(values).index_copy_(0, self.row_order, values)
        return self._block_values

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **how: Any) -> torch.Tensor:
        y = _FP8Product.apply(input, weight, self, how["allreduce_dgrad"], how["sequence_parallel"], how["tp_group"])
        bias = how.get("bias")
        return y if bias is None else y + bias


def in_order(weight: torch.Tensor, row_order: torch.Tensor | None) -> torch.Tensor:
    """The weight's rows in the order in which they are quantised."""
    return weight if row_order is None else weight[row_order]


def _with_master_dtype(config: TransformerConfig) -> TransformerConfig:
    """The same configuration with FP32 parameters: an FP8 layer's parameter is the master itself, never rounded to bf16."""
    import copy

    config = copy.copy(config)
    config.params_dtype = torch.float32
    return config


class FP8ColumnParallelLinear(_FP8Linear, ColumnParallelLinear):
    """y = x W^T with W's rows split over tensor-parallel ranks; `weight` float32 [N / tp, K]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=_with_master_dtype(config), **kwargs)
        self.scale_format = config.fp8_scale_format
        if self.bias is not None:  # of q, k and v: not FP8, so it has no FP32 master
            self.bias.data = self.bias.data.to(config.params_dtype)


class FP8RowParallelLinear(_FP8Linear, RowParallelLinear):
    """y = sum over ranks of x_r W_r^T with W's columns split over tensor-parallel ranks; `weight` float32 [N, K / tp]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=_with_master_dtype(config), **kwargs)
        self.scale_format = config.fp8_scale_format


class FP8ReplicatedLinear(_FP8Linear, ReplicatedLinear):
    """y = x W^T with the whole W on every tensor-parallel rank; `weight` float32 [N, K]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=_with_master_dtype(config), **kwargs)
        self.scale_format = config.fp8_scale_format


def fp8_layers(model: torch.nn.Module) -> dict[str, _FP8Linear]:
    """Name -> layer for every FP8 linear of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _FP8Linear)}


def quantize_model(model: GPTModel) -> None:
    """Quantises every FP8 linear of a model from its master: once after loading, once per optimizer step. Collective: a RunError that
    names a broken weight is raised on every rank."""
    broken = None
    try:
        for name, layer in fp8_layers(model).items():
            layer.quantize(global_name(model, f"{name}.weight"))
    except RunError as error:
        broken = error
    raise_together(broken)
