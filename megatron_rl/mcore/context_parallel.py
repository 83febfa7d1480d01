"""Context parallelism: ranks share the places of every packed sequence, and exchange places for heads around the attention.

Which places are a rank's is `packing.context_places`. What works token by token never notices. For the attention, an all-to-all gives
each rank all places of h / cp heads (DeepSpeed-Ulysses, arXiv 2309.14509), so that it is computed by the same operator, with the same
bits, as without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.batch.packing import context_places


@dataclass(frozen=True)
class Share:
    """A rank's places of a row of t, and how the ranks' parts become the row again. Alone, a rank has them all."""

    group: Any
    own: torch.Tensor
    """int64 [t / cp]: this rank's places."""
    held: torch.Tensor
    """int64 [t]: all ranks' places, rank after rank."""
    found: torch.Tensor
    """int64 [t]: where in `held` each place is."""

    @classmethod
    def of_this_rank(cls, lengths: list[int], device: torch.device) -> Share:
        """Of sequences of `lengths` places."""
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        if size == 1:
            parts = torch.arange(sum(lengths), device=device).unsqueeze(0)
        else:
            parts = torch.tensor([context_places(lengths, rank, size) for rank in range(size)], device=device)
        held = parts.flatten()
        return cls(group, parts[group.rank()], held, held.argsort())

    @property
    def size(self) -> int:
        return self.group.size()

    def take(self, row: torch.Tensor) -> torch.Tensor:
        """This rank's part [1, t / cp] of a row [1, t]."""
        return row if self.size == 1 else row[:, self.own]

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The row [1, t] of all ranks' parts [1, t / cp], with gradient: all ranks must go on with it alike."""
        return part if self.size == 1 else _Whole.apply(part, self)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[t / cp, h, d] of this rank's places -> [t, h / cp, d] of this rank's heads, with gradient."""
        return _ToHeads.apply(x, self)

    def to_places(self, x: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return _ToPlaces.apply(x, self)

    def enough_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values [t, g, d] with every head as often as it takes for cp to divide them: queries share them in the same order."""
        return x.repeat_interleave(self.size // math.gcd(self.size, x.shape[1]), dim=1)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        gathered = part.new_empty(part.shape[1] * share.size)
        dist.all_gather_into_tensor(gathered, part[0].contiguous(), group=share.group)
        return gathered[share.found].unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.share.take(gradient), None  # every rank computes the same loss of the same row: nothing to add up


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        return _to_heads(x, share)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_places(gradient, ctx.share), None


class _ToPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        return _to_places(x, share)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(gradient, ctx.share), None


def _to_heads(x: torch.Tensor, share: Share) -> torch.Tensor:
    heads_first = x.unflatten(1, (share.size, -1)).transpose(0, 1)
    return _exchanged(heads_first, share).flatten(0, 1)[share.found]


def _to_places(x: torch.Tensor, share: Share) -> torch.Tensor:
    ranks_first = x[share.held].unflatten(0, (share.size, -1))
    return _exchanged(ranks_first, share).transpose(0, 1).flatten(1, 2)


def _exchanged(parts: torch.Tensor, share: Share) -> torch.Tensor:
    """[cp, ...]: part r goes to rank r, and what rank r had for this one takes its place."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=share.group)
    return received
