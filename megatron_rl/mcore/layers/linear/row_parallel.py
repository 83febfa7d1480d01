"""Megatron's row-parallel linear layer with sums in tree order (`kernels.sums.reference`), the same at any tensor-parallel size."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import RowParallelLinear

from megatron_rl.kernels.linear.base import Operand
from megatron_rl.kernels.sums import ranks
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.mcore.base.exchange import Pending, pend, start_scatter
from megatron_rl.mcore.base.weight_gradient import WeightGradient, multiply, take_weight


def gather_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-gather the sequence dimension: [s / tp, b, h] -> [s, b, h]."""
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


@dataclass(frozen=True)
class RowSum:
    """How the ranks of a row-parallel layer add their partial results: in tree order."""

    group: Any
    scatter: bool  # sequence parallelism: each rank receives the sums of its own tokens
    by_tree: ClassVar[bool] = True

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the partial result of x `[..., K]` and weight `[N, K]`, which are not quantized."""
        return tree.multiply(x, weight)

    def multiply_operands(self, backend: Any, x: Operand, weight: Any) -> torch.Tensor:
        """Return the partial result of a backend's operands, with T tokens in dimension -2."""
        return backend.fprop_by_tree(x, weight)

    def reduce_whole(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `reduce` of a product `[s, b, N]` over all of this rank's numbers."""
        return self.reduce(partial, dtype)

    def reduce(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sums of float32 [s, b, N] in `dtype`; [s / tp, b, N] if tokens are scattered."""
        return (tree.reduce_scatter if self.scatter else tree.reduce)(partial, self.group, dtype)

    def start(self, partial: torch.Tensor, dtype: torch.dtype) -> Pending:
        """Start `reduce` if tokens are scattered."""
        received = torch.empty_like(partial, memory_format=torch.contiguous_format)
        finish = pend(dist.all_to_all_single(received, partial.contiguous(), group=self.group, async_op=True), received)
        return lambda: tree.add(finish().chunk(self.group.size())).to(dtype)

    def take_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's partial result [s, b, N]."""
        return gather_sequence(dy, self.group) if self.scatter else dy


@dataclass(frozen=True)
class PartialSum(RowSum):
    """Leaves float32 partial results to be added later, and rounds their gradient to `dtype`."""

    dtype: torch.dtype

    def reduce(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return partial

    def take_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        return dy.to(self.dtype)


@dataclass(frozen=True)
class ScatteredSum(RowSum):
    """A reduce-scatter of rounded partial results, in the library's order (`config.sums_by_tree` is False)."""

    by_tree: ClassVar[bool] = False

    def multiply_operands(self, backend: Any, x: Operand, weight: Any) -> torch.Tensor:
        return backend.fprop(x, weight)

    def reduce(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.start(partial, dtype)()

    def start(self, partial: torch.Tensor, dtype: torch.dtype) -> Pending:
        return start_scatter(partial.to(dtype), self.group)


@dataclass(frozen=True)
class RankSum(RowSum):
    """Products over slices of this rank's numbers, rounded to the dtype of the layer, which all ranks add in order (`kernels.sums.ranks`).
    Partial results are `[slices, s, b, N]`."""

    slices: int = 1
    by_tree: ClassVar[bool] = False

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ranks.multiply_slices(x, weight, self.slices)

    def multiply_operands(self, backend: Any, x: Operand, weight: Any) -> torch.Tensor:
        return backend.fprop_slices(x, weight, self.slices)

    def reduce_whole(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.reduce(partial.to(dtype).unsqueeze(0), dtype)

    def reduce(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.start(partial, dtype)() if self.scatter else ranks.reduce(partial, self.group)

    def start(self, partial: torch.Tensor, dtype: torch.dtype) -> Pending:
        sent = ranks.spread(partial, self.group.size())
        finish = pend(dist.all_to_all_single(received := torch.empty_like(sent), sent, group=self.group, async_op=True), received)
        return lambda: ranks.add_received(finish())


class TreeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, row_sum: RowSum) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.row_sum = row_sum
        return row_sum.reduce(row_sum.multiply(x, weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy, dx, dw = ctx.row_sum.take_gradient(dy), None, None
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
        if ctx.needs_input_grad[1]:
            gradient = WeightGradient(weight)
            gradient.add(dy.flatten(0, -2), x.flatten(0, -2))
            dw = gradient.finish()
        return dx, dw, None


class TreeRowParallelLinear(RowParallelLinear):
    """y = sum over ranks of x_r W_r^T in tree order, rounded once. With `config.row_parts`, see `RankSum`;
    otherwise Megatron's own layer."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        row_sum = self.choose_sum(input_.dtype)
        if row_sum is None:
            return super().forward(input_)
        options = {"bias": None, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}
        y = self._forward_impl(input=input_, weight=self.weight, row_sum=row_sum, **options)
        if self.skip_bias_add:
            return y, take_weight(self.bias)
        return (y if self.bias is None else y + self.bias), None

    def choose_sum(self, dtype: torch.dtype) -> RowSum | None:
        """Return how ranks add their partial results, or None for Megatron's own way."""
        is_cut = self.tp_group.size() > 1
        if (parts := self.config.row_parts) > 1:
            return RankSum(self.tp_group, is_cut and self.sequence_parallel, max(parts // self.tp_group.size(), 1))
        if not self.config.sums_by_tree:
            return None
        if is_cut and self.explicit_expert_comm:  # `moe.experts` adds the results of all experts at once
            return PartialSum(self.tp_group, False, dtype)
        return RowSum(self.tp_group, is_cut and self.sequence_parallel)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, row_sum: RowSum | None = None, **options: Any) -> Any:
        if row_sum is None:
            return multiply(super()._forward_impl, input, weight, *args, **options)
        return TreeProduct.apply(input, weight, row_sum)
