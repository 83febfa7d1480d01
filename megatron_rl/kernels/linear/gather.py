"""All-gathers, over ranks that share a row's tokens equally, of what each has quantized of its own.

A row is quantized in groups along its features, so the gathered bytes are those of the gathered row. Columns are quantized in groups of 128
tokens: they are, too, where every rank has a multiple of 128. A byte and 1/32 travel for each value, in the place of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist

from megatron_rl.kernels.linear.base import Backend, Operand

PendingOperand = Callable[[], Operand]
"""Waits, and returns the operand of all tokens."""


class GatheringBackend(Backend, Protocol):
    """What a `Backend` may have besides."""

    gathered_tokens: int
    """Rows are gathered of multiples of so many tokens on each rank."""
    gathers_bytes: bool
    """Operands are bytes, smaller than what was quantized."""

    def start_gather(self, operand: Operand, group: Any) -> PendingOperand:
        """Begin to gather an operand that has rows, or columns of a multiple of 128 tokens."""


def can_gather(backend: Any, tokens: int) -> TypeGuard[GatheringBackend]:
    """Return whether a backend gathers what ranks quantize of so many tokens each; else they gather activations, and each quantizes all."""
    return hasattr(backend, "start_gather") and tokens % backend.gathered_tokens == 0


def gather_first(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    """Begin to gather the first dimension: return (the result, what to wait for)."""
    x = x.contiguous()
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    data = (x.view(torch.uint8), gathered.view(torch.uint8)) if x.itemsize == 1 else (x, gathered)  # gloo knows no float8
    return gathered, dist.all_gather_into_tensor(data[1], data[0], group=group, async_op=True)


def wait(*works: Any) -> None:
    for work in works:
        work.wait()


def start_gathering_rows(data: torch.Tensor, scale: torch.Tensor, group: Any) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Begin to gather bytes [t, K] and scales [K / 128, t]; the result waits and returns [T, K] and [K / 128, T padded to 4]."""
    (gathered, first), (scales, second) = gather_first(data, group), gather_first(scale.t(), group)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        wait(first, second)
        tokens = len(gathered)
        aligned = scale.new_zeros(len(scale), -(-tokens // 4) * 4)  # as both libraries read them
        aligned[:, :tokens] = scales.t()
        return gathered, aligned

    return finish


def start_gathering_columns(data: torch.Tensor, scale: torch.Tensor, group: Any) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Begin to gather bytes [K, t] and scales [t / 128, K]; the result waits and returns [K, T] and [T / 128, K]."""
    (gathered, first), (scales, second) = gather_first(data, group), gather_first(scale, group)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        wait(first, second)
        of_ranks = gathered.view(torch.uint8).unflatten(0, (group.size(), -1))  # [tp, K, t]
        return of_ranks.transpose(0, 1).flatten(1).view(data.dtype), scales

    return finish
