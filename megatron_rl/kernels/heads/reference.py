"""Queries, keys and values from the product of all three, in one pass: split, normalized by head, rotated.

`mixed` `[t, groups (queries + 2) d]` holds, for each key-value head, its queries, its key and its value. Norms are those of
`kernels.norm.reference` and rotations those of `kernels.rope.reference`, each rounded to the dtype of `mixed`, as separate operators round.
Values are views of `mixed`. The backward pass needs only `mixed`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.heads import Heads, Norms
from megatron_rl.kernels.norm.reference import differentiate, normalize
from megatron_rl.kernels.rope.reference import Rotation, rotate

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def can_rotate(rotation: Rotation, dim: int) -> bool:
    """Return whether the kernel supports the rotation: whole heads whose width is a power of two."""
    return 2 * rotation.cos.shape[1] == dim and dim & (dim - 1) == 0


def split_heads(mixed: torch.Tensor, heads: Heads, norms: Norms) -> QueryKeyValue:
    """Return query `[t, groups queries, d]`, key `[t, groups, d]` and value, a view of `mixed`, with gradient."""
    result: QueryKeyValue = _Split.apply(mixed, *(norms or (None, None)), heads)
    return result


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, of_query: torch.Tensor | None, of_key: torch.Tensor | None, heads: Heads) -> QueryKeyValue:
        ctx.save_for_backward(mixed, of_query, of_key)
        ctx.heads = heads
        norms = None if of_query is None or of_key is None else (of_query, of_key)
        return *rotate_heads(mixed, heads, norms), view_heads(mixed, heads)[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mixed, *weights = ctx.saved_tensors
        norms = None if weights[0] is None else (weights[0], weights[1])
        of_mixed, of_norms = differentiate_heads(gradients, mixed, ctx.heads, norms)
        return of_mixed, *(of_norms or (None, None)), None


def view_heads(mixed: torch.Tensor, heads: Heads) -> QueryKeyValue:
    """Return views of queries `[t, groups, queries, d]`, keys `[t, groups, 1, d]` and values `[t, groups, d]`."""
    by_head = mixed.view(len(mixed), heads.groups, heads.queries + 2, -1)
    return by_head[:, :, : heads.queries], by_head[:, :, heads.queries : -1], by_head[:, :, -1]


@with_kernel
def rotate_heads(mixed: torch.Tensor, heads: Heads, norms: Norms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key of `split_heads`, without gradient."""
    query, key = (part.flatten(1, 2) for part in view_heads(mixed, heads)[:2])
    if norms is not None:
        query, key = (normalize(x, None, weight, heads.eps)[2] for x, weight in zip((query, key), norms, strict=True))
    return rotate(query, heads.rotation, 1.0), rotate(key, heads.rotation, 1.0)


@with_kernel
def turn_heads(query: torch.Tensor, key: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query `[t, heads, d]` and key `[t, groups, d]`, which may be parts of wider rows, rotated, without gradient."""
    return rotate(query, rotation, 1.0), rotate(key, rotation, 1.0)


@with_kernel
def normalize_heads(query: torch.Tensor, key: torch.Tensor, norms: Norms, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of the heads of query `[t, heads, d]` and key `[t, groups, d]`, which may be parts of wider rows, without
    gradient."""
    assert norms is not None
    return normalize(query, None, norms[0], eps)[2], normalize(key, None, norms[1], eps)[2]


@with_kernel
def normalize_and_turn_heads(
    query: torch.Tensor, key: torch.Tensor, norms: Norms, eps: float, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `turn_heads` of `normalize_heads`."""
    return turn_heads(*normalize_heads(query, key, norms, eps), rotation)


@with_kernel
def differentiate_heads(gradients: Sequence[torch.Tensor], mixed: torch.Tensor, heads: Heads, norms: Norms) -> tuple[torch.Tensor, Norms]:
    """Return (gradient of `mixed`, gradients of the norm weights) for the gradients of query, key and value."""
    parts, of_norms = [], []
    for number, x in enumerate(view_heads(mixed, heads)[:2]):
        dx = rotate(gradients[number], heads.rotation, -1.0)
        if norms is not None:
            flat = x.flatten(1, 2)
            statistic = normalize(flat, None, norms[number], heads.eps)[1]
            dx, of_weight = differentiate(dx, flat, statistic, norms[number], None)
            of_norms.append(of_weight)
        parts.append(dx.view(x.shape))
    of_mixed = torch.cat([*parts, gradients[2].unsqueeze(2)], 2).view(mixed.shape)
    return of_mixed, (of_norms[0], of_norms[1]) if norms is not None else None
