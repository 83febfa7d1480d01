"""How queries, keys and values lie in the product of all three, and what `kernels.heads.split_heads` makes of them, on any device.

`mixed` [t, groups (queries + 2) d] holds, for each key-value head, its queries, its key and its value. Norms are `kernels.norm.reference`'s, rotation is
`kernels.rope.reference`'s, each rounded to the dtype of `mixed`, as operators one after the other round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_rl.kernels.norm.reference import differentiate_reference, normalize_reference
from megatron_rl.kernels.rope.reference import Rotation, rotate_reference


class Heads(NamedTuple):
    """How `mixed` is laid out, and what is done to it."""

    groups: int
    queries: int
    """Of a group."""
    rotation: Rotation
    """Of whole heads."""
    eps: float


Norms = tuple[torch.Tensor, torch.Tensor] | None
"""Weights [d] of queries and keys; None where they have no norms."""
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def take_apart(mixed: torch.Tensor, heads: Heads) -> Three:
    """Return views [t, groups, queries, d], [t, groups, 1, d] and [t, groups, d]."""
    by_head = mixed.view(len(mixed), heads.groups, heads.queries + 2, -1)
    return by_head[:, :, : heads.queries], by_head[:, :, heads.queries : -1], by_head[:, :, -1]


def rotate_heads_reference(mixed: torch.Tensor, heads: Heads, norms: Norms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel does, on any device."""
    query, key = (part.flatten(1, 2) for part in take_apart(mixed, heads)[:2])
    if norms is not None:
        query, key = (normalize_reference(x, None, weight, heads.eps)[2] for x, weight in zip((query, key), norms, strict=True))
    return rotate_reference(query, heads.rotation, 0, 1.0), rotate_reference(key, heads.rotation, 0, 1.0)


def differentiate_heads_reference(
    gradients: Sequence[torch.Tensor], mixed: torch.Tensor, heads: Heads, norms: Norms
) -> tuple[torch.Tensor, Norms]:
    """Return (the gradient of `mixed`, those of the norms' weights) for the gradients of query, key and value."""
    parts, of_norms = [], []
    for number, x in enumerate(take_apart(mixed, heads)[:2]):
        dx = rotate_reference(gradients[number], heads.rotation, 0, -1.0)
        if norms is not None:
            flat = x.flatten(1, 2)
            statistic = normalize_reference(flat, None, norms[number], heads.eps)[1]
            dx, of_weight = differentiate_reference(dx, flat, statistic, norms[number], None)
            of_norms.append(of_weight)
        parts.append(dx.view(x.shape))
    of_mixed = torch.cat([*parts, gradients[2].unsqueeze(2)], 2).view(mixed.shape)
    return of_mixed, (of_norms[0], of_norms[1]) if norms is not None else None
