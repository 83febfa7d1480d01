"""All-gathers of quantized operands over ranks that share the tokens equally.

Rows are quantized in groups along the features, so the gathered bytes equal those of the gathered activation. Columns are quantized in
groups of 128 tokens, so this also holds for them if every rank has a multiple of 128 tokens. One value costs 1 + 1/32 bytes instead of 2.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist

from megatron_rl.kernels.linear.base import Backend, Operand

PendingOperand = Callable[[], Operand]  # waits for the gather and returns the operand of all tokens


class GatheringBackend(Backend, Protocol):
    """A `Backend` that can gather quantized operands."""

    gathered_tokens: int  # rows can be gathered if each rank has a multiple of this many tokens
    gathers_bytes: bool  # whether operands are smaller than the activations that they quantize

    def start_gather(self, operand: Operand, group: Any) -> PendingOperand:
        """Start to gather an operand that has rows, or columns of a multiple of 128 tokens."""


def can_gather(backend: Any, tokens: int) -> TypeGuard[GatheringBackend]:
    """Return whether the backend gathers quantized operands of `tokens` tokens per rank. If not, ranks gather activations and quantize
    all."""
    return hasattr(backend, "start_gather") and tokens % backend.gathered_tokens == 0


def gather_first(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    """Start to gather along the first dimension. Return (result, work to wait for)."""
    x = x.contiguous()
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    data = (x.view(torch.uint8), gathered.view(torch.uint8)) if x.itemsize == 1 else (x, gathered)  # gloo does not support float8
    return gathered, dist.all_gather_into_tensor(data[1], data[0], group=group, async_op=True)


def wait(*works: Any) -> None:
    for work in works:
        work.wait()


def start_gathering_rows(data: torch.Tensor, scale: torch.Tensor, group: Any) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Start to gather bytes `[t, K]` and scales `[K/128, t]`. The result waits and returns `[T, K]` and `[K/128, T padded to 4]`."""
    (gathered, first), (scales, second) = gather_first(data, group), gather_first(scale.t(), group)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        wait(first, second)
        tokens = len(gathered)
        aligned = scale.new_zeros(len(scale), -(-tokens // 4) * 4)  # the layout that both libraries read
        aligned[:, :tokens] = scales.t()
        return gathered, aligned

    return finish


def start_gathering_columns(data: torch.Tensor, scale: torch.Tensor, group: Any) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Start to gather bytes `[K, t]` and scales `[t/128, K]`. The result waits and returns `[K, T]` and `[T/128, K]`."""
    (gathered, first), (scales, second) = gather_first(data, group), gather_first(scale, group)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        wait(first, second)
        of_ranks = gathered.view(torch.uint8).unflatten(0, (group.size(), -1))  # [tp, K, t]
        return of_ranks.transpose(0, 1).flatten(1).view(data.dtype), scales

    return finish
