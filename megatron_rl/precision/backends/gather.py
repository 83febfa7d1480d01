"""All-gathers, over ranks that share a row's tokens equally, of what each has quantized of its own.

A row is quantized in groups along its features, so the gathered bytes are those of the gathered row. Columns are quantized in groups of 128
tokens: they are, too, where every rank has a multiple of 128. A byte and 1/32 travel for each value, in the place of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist

from megatron_rl.precision.backends.base import Backend, Operand

PendingOperand = Callable[[], Operand]
"""Waits, and returns the operand of all tokens."""


class GatheringBackend(Backend, Protocol):
    """What a `Backend` may have besides."""

    def start_gather(self, operand: Operand, group: Any) -> PendingOperand:
        """Begin to gather an operand that has rows, or columns of a multiple of 128 tokens."""


def can_gather(backend: Any) -> TypeGuard[GatheringBackend]:
    """Return whether a backend gathers its operands; else ranks gather activations, and each quantizes all."""
    return hasattr(backend, "start_gather")


def gather_first(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    """Begin to gather the first dimension: return (the result, what to wait for)."""
    x = x.contiguous()
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    data = (x.view(torch.uint8), gathered.view(torch.uint8)) if x.itemsize == 1 else (x, gathered)  # gloo knows no float8
    return gathered, dist.all_gather_into_tensor(data[1], data[0], group=group, async_op=True)


def wait(*works: Any) -> None:
    for work in works:
        work.wait()
