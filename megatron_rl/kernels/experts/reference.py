"""Moves of rows of tokens to their experts and back; on a GPU, one kernel each that reads a row once. Sums are in FP32, in the order of a
token's experts, and rounded once, as in SGLang.

`order` int64 `[n, k]` holds the places of the k rows of each token among the n k rows sorted by expert. `places` int64 `[n]` holds the
places of n rows among more rows (`kernels.quantize.token_groups`). `place_tokens` and `tabulate_parts` compute places from counts that only
the device knows (`mcore.layers.moe.forecast`).
"""

from typing import Any

import torch

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from parallel.formats import BLOCK


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


@with_kernel
def place_tokens(
    chosen: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, sizes: torch.Tensor, noted: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (place int64 `[n k]` of each row of this rank's tokens in the parts that it sends; weights float32 `[total]` at these places).
    Other weights are arbitrary, and so are all results if a part is too small. No place is outside the parts.

    Args:
        chosen: int64 `[n k]`, sorted: expert times n plus token of each row.
        weights: float32 `[experts n]`, of each token for each expert.
        counts: int64 `[experts]`, tokens that this rank sends to each expert.
        sizes: int64 `[ranks]`, rows of the part for each rank; `total` is their sum on the host.
        noted: float32 `[ranks + 1]`, set to the maximum of itself and the share of the n k rows that each rank gets, and how many rows the
            parts lack at most.
    """
    of_ranks = counts.view(len(sizes), -1).sum(1)
    spare = sizes - of_ranks
    shifts = (spare.cumsum(0) - spare)[chosen // (len(weights) // len(sizes))]
    places = (torch.arange(len(chosen), device=chosen.device) + shifts).clamp(max=total - 1)
    torch.maximum(noted, torch.cat([of_ranks / len(chosen), -spare.amin(0, keepdim=True)]).float(), out=noted)
    return places, weights.new_zeros(total).index_copy_(0, places, weights.index_select(0, chosen))


@with_kernel
def tabulate_parts(counts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tables (sources int32 `[T]`, experts int32 `[T]`, places int64 `[S size]`) of `group_parts` for counts int64
    `[S, E]`. T is the most rows that the groups can need. Places of rows without a token are 0."""
    parts, experts = counts.shape
    rows, n = (parts * size // BLOCK + experts) * BLOCK, parts * size
    lengths = (counts.sum(0) + BLOCK - 1) // BLOCK * BLOCK
    first_rows = (lengths.cumsum(0) - lengths + counts.cumsum(0) - counts).t().flatten()
    first_tokens = (torch.arange(parts, device=counts.device) * size).unsqueeze(1) + counts.cumsum(1) - counts
    row = torch.arange(rows, device=counts.device)
    chunk = torch.searchsorted(first_rows, row, right=True) - 1  # tokens of one part for one expert
    offset = row - first_rows[chunk]
    sources = torch.where(offset < counts.t().flatten()[chunk], first_tokens.t().flatten()[chunk] + offset, -1).clamp(max=n - 1)
    places = row.new_zeros(n + 1).index_copy_(0, torch.where(sources < 0, n, sources), row)[:n]
    return sources.int(), torch.where(row < lengths.sum(), chunk // parts, -1).int(), places


def group_parts(counts: torch.Tensor, size: int) -> TokenGroups:
    """Return the groups of S parts of `size` rows each, n = S `size`. Each part begins with tokens, sorted by expert; `counts` int64
    `[S, E]`, on the device, are their numbers. The rest of a part is in no row, and its place is 0. DeepGEMM skips rows of expert -1 on
    Hopper, and multiplies them with expert 0 on Blackwell."""
    sources, experts, places = tabulate_parts(counts, size)
    none = counts.new_empty(0)
    return TokenGroups([], places, sources, experts, none.int(), (none, none))
