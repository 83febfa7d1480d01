"""The sum over a token's experts in the order of a fixed binary tree over all expert numbers.

A node of n experts adds the sum of its first ceil(n / 2) experts and the sum of the rest, in FP32. Experts that the token did not choose
are left out, which equals adding zero. If `ep` ranks share the experts, with ep a power of two that divides their number, the experts of a
rank are a node. So the sum has the same bits whether the token's rank adds up all outputs or each rank adds its own before `tree.add`.

Additions are planned once from the chosen experts and then run on whole rows. A level of the tree adds at most one row to any other row, so
the order within a level does not matter.
"""

import functools
from typing import Any

import torch

from parallel.row_sums import halve

_TILE = 1 << 20  # numbers converted to FP32 at a time on a CPU
_GPU_TILE = 1 << 28


def sum_experts(
    outputs: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, num_tokens: int, num_experts: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the sum of each token's outputs `[num_tokens, H]`, rounded once to `dtype`, with gradient; zeros for a token without outputs.

    Args:
        outputs: `[n, H]`; row i is the output of expert `experts[i]` for token `tokens[i]`, in any order.
        tokens, experts: int64 `[n]`, without duplicate pairs.
        num_experts: Number of experts in the whole tree, or in the node of this rank.
    """
    return _ExpertSum.apply(outputs, tokens, experts, num_tokens, num_experts, dtype)


class _ExpertSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, tokens: torch.Tensor, *shape: Any) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.dtype = outputs.dtype
        return _add(outputs, tokens, *shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return gradient.to(ctx.dtype).index_select(0, tokens), None, None, None, None, None


def _add(
    outputs: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, num_tokens: int, num_experts: int, dtype: torch.dtype
) -> torch.Tensor:
    result = outputs.new_zeros(num_tokens, outputs.shape[1], dtype=dtype)
    if not len(outputs):
        return result
    first, levels = _plan(tokens, experts, num_experts)
    found = tokens[first]
    width = max((_GPU_TILE if outputs.is_cuda else _TILE) // len(outputs), 1)
    for part, target in zip(outputs.split(width, 1), result.split(width, 1), strict=True):
        sums = part.to(torch.float32, copy=True)
        for into, addends in levels:
            sums.index_copy_(0, into, sums.index_select(0, into).add_(sums.index_select(0, addends)))
        target.index_copy_(0, found, sums.index_select(0, first).to(dtype))
    return result


def _plan(tokens: torch.Tensor, experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the rows that end up with the sums of the tokens `[t]` and, for each level of the tree, deepest first, (rows to add to, rows
    that are added).

    Each node with experts of a token on both sides corresponds to one pair of neighbors in the order of experts. The level of the node
    follows from the highest bit in which their paths differ. The first row of each side holds the sum of that side.
    """
    paths = _paths(num_experts).to(tokens.device)
    bits = int(num_experts - 1).bit_length()
    keys, rows = ((tokens << bits) | paths[experts]).sort()
    height = torch.frexp((keys[1:] ^ keys[:-1]).double()).exponent.long()  # the number of bits; beyond `bits` between two tokens
    left = torch.searchsorted(keys, keys[:-1] >> height << height)
    order = height.argsort(stable=True)
    counts = torch.bincount(height.clamp(max=bits + 1), minlength=bits + 2)[: bits + 1].tolist()
    is_first = torch.cat([height.new_ones(1, dtype=torch.bool), height > bits])
    levels = []
    for pairs in order[: sum(counts)].split(counts):
        if len(pairs):
            levels.append((rows[left[pairs]], rows[pairs + 1]))
    return rows[is_first], levels


@functools.cache
def _paths(num_experts: int) -> torch.Tensor:
    """Return the path of each expert from the root, one bit per level, padded with zeros: int64 `[experts]`, ascending."""

    def walk(count: int, path: int, level: int) -> list[int]:
        if count == 1:
            return [path]
        half = halve(count)
        return walk(half, path, level - 1) + walk(count - half, path | 1 << (level - 1), level - 1)

    return torch.tensor(walk(num_experts, 0, int(num_experts - 1).bit_length()))
