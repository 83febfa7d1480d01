"""Queries, keys and values out of the product of all three, in one pass: taken apart, normed by head, rotated (`kernels.heads.reference`).

Values stay where they are. For the backward pass the product is kept, nothing else, and its gradient comes whole.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.kernels.heads.reference import Heads, Norms, Three, differentiate_heads_reference, rotate_heads_reference, take_apart
from megatron_rl.kernels.rope.reference import Rotation


def can_rotate(rotation: Rotation, dim: int) -> bool:
    """Return whether one pass can: heads of a power of two are rotated whole."""
    return 2 * rotation.cos.shape[1] == dim and dim & (dim - 1) == 0


def split_heads(mixed: torch.Tensor, heads: Heads, norms: Norms) -> Three:
    """Return query [t, groups queries, d], key [t, groups, d] and value, a view of `mixed`, with gradient."""
    result: Three = _Split.apply(mixed, *(norms or (None, None)), heads)
    return result


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, of_query: torch.Tensor | None, of_key: torch.Tensor | None, heads: Heads) -> Three:
        ctx.save_for_backward(mixed, of_query, of_key)
        ctx.heads = heads
        norms = None if of_query is None or of_key is None else (of_query, of_key)
        if mixed.is_cuda:
            from megatron_rl.kernels.heads.triton import rotate

            query, key = rotate(mixed, heads, norms)
        else:
            query, key = rotate_heads_reference(mixed, heads, norms)
        return query, key, take_apart(mixed, heads)[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mixed, *weights = ctx.saved_tensors
        norms = None if weights[0] is None else (weights[0], weights[1])
        if mixed.is_cuda:
            from megatron_rl.kernels.heads.triton import differentiate

            of_mixed, of_norms = differentiate(gradients, mixed, ctx.heads, norms)
        else:
            of_mixed, of_norms = differentiate_heads_reference(gradients, mixed, ctx.heads, norms)
        return of_mixed, *(of_norms or (None, None)), None
