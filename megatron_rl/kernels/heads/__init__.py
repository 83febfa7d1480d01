"""Splitting, normalizing and rotating query and key heads."""

from typing import NamedTuple

import torch

from megatron_rl.kernels.rope.reference import Rotation


class Heads(NamedTuple):
    """The layout of `mixed` and the parameters of its norms and rotation."""

    groups: int
    queries: int  # query heads per group
    rotation: Rotation  # rotation of whole heads
    eps: float


Norms = tuple[torch.Tensor, torch.Tensor] | None  # norm weights `[d]` of queries and keys, or None without norms
