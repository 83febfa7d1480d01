"""Moves of rows of tokens to their experts and back; on a GPU, one kernel each that reads a row once. Sums are in FP32, in the order of a
token's experts, and rounded once, as in SGLang.

`order` int64 `[n, k]` holds the places of the k rows of each token among the n k rows sorted by expert. `places` int64 `[n]` holds the
places of n rows among more rows (`kernels.experts.token_groups`).
"""

from typing import Any

import torch

from megatron_rl.kernels import with_kernel


def scatter_tokens(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `[n k, h]`: each token of x `[n, h]`, of any dtype, at its k places. The gradient of a token is the sum over its rows."""
    return _Move.apply(x, order, True)


def sum_tokens(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `[n, h]` in the dtype of x: the sum of each token's rows of x `[n k, h]`, with gradient."""
    return _Move.apply(x, order, False)


class _Move(torch.autograd.Function):
    """One of the two moves below; its gradient is the other move."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, scatters: bool) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.scatters = scatters
        return (scatter if scatters else sum_rows)(x, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (sum_rows if ctx.scatters else scatter)(gradient, *ctx.saved_tensors), None, None


@with_kernel
def scatter(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.new_empty(order.numel(), x.shape[1]).index_copy_(0, order.flatten(), x.repeat_interleave(order.shape[1], 0))


@with_kernel
def sum_rows(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, order.flatten()).unflatten(0, order.shape).sum(1, dtype=torch.float32).to(x.dtype)


@with_kernel
def collect(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows `places` of x `[T, h]`, multiplied by float32 weights `[n]` in FP32 and rounded once. No gradient."""
    rows = x.index_select(0, places)
    return rows if weights is None else weigh(rows, weights)


def weigh(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return x `[n, h]` times float32 weights `[n]`, multiplied in FP32 and rounded once, in one kernel without an FP32 copy."""
    result: torch.Tensor = torch.mul(x, weights.unsqueeze(-1), out=torch.empty_like(x))
    return result
