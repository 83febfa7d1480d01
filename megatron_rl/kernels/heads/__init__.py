"""Splitting, normalizing and rotating query and key heads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_rl.kernels.rope.reference import Rotation


class Heads(NamedTuple):
    """The layout of `mixed` and the parameters of its norms and rotation."""

    groups: int
    queries: int
    """Query heads per group."""
    rotation: Rotation
    """Rotation of whole heads."""
    eps: float


Norms = tuple[torch.Tensor, torch.Tensor] | None
"""Norm weights `[d]` of queries and keys, or None without norms."""
