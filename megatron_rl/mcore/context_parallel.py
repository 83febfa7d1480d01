"""Context parallelism: ranks share the places of every packed sequence, and exchange places for heads around the attention.

Which places are a rank's is `packing.context_parallel_positions`. What works token by token never notices. For the attention, an
all-to-all gives
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

from megatron_rl.batch.packing import context_parallel_positions


@dataclass(frozen=True)
class ContextShard:
    """A rank's places of a row of t, and how the ranks' parts become the row again. Alone, a rank has them all."""

    group: Any
    own_positions: torch.Tensor
    """int64 [t / cp]: this rank's places."""
    gathered_positions: torch.Tensor
    """int64 [t]: all ranks' places, rank after rank."""
    restore_index: torch.Tensor
    """int64 [t]: where in `gathered_positions` each place is."""

    @classmethod
    def for_this_rank(cls, lengths: list[int], device: torch.device) -> ContextShard:
        """Of sequences of `lengths` places."""
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        if size == 1:
            parts = torch.arange(sum(lengths), device=device).unsqueeze(0)
        else:
            parts = torch.tensor([context_parallel_positions(lengths, rank, size) for rank in range(size)], device=device)
        gathered_positions = parts.flatten()
        return cls(group, parts[group.rank()], gathered_positions, gathered_positions.argsort())

    @property
    def size(self) -> int:
        return self.group.size()

    def select(self, row: torch.Tensor) -> torch.Tensor:
        """This rank's part [1, t / cp] of a row [1, t]."""
        return row if self.size == 1 else row[:, self.own_positions]

    def gather_row(self, part: torch.Tensor) -> torch.Tensor:
        """The row [1, t] of all ranks' parts [1, t / cp], with gradient: all ranks must go on with it alike."""
        return part if self.size == 1 else _GatherRow.apply(part, self)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[t / cp, h, d] of this rank's places -> [t, h / cp, d] of this rank's heads, with gradient."""
        return _ToHeads.apply(x, self)

    def to_positions(self, x: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return _ToPositions.apply(x, self)

    def repeat_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values [t, g, d] with every head as often as it takes for cp to divide them: queries share them in the same order."""
        return x.repeat_interleave(self.size // math.gcd(self.size, x.shape[1]), dim=1)


class _GatherRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, shard: ContextShard) -> torch.Tensor:
        ctx.shard = shard
        gathered = part.new_empty(part.shape[1] * shard.size)
        dist.all_gather_into_tensor(gathered, part[0].contiguous(), group=shard.group)
        return gathered[shard.restore_index].unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.shard.select(gradient), None  # every rank computes the same loss of the same row: nothing to add up


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
        ctx.shard = shard
        return _to_heads(x, shard)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_positions(gradient, ctx.shard), None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
        ctx.shard = shard
        return _to_positions(x, shard)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(gradient, ctx.shard), None


def _to_heads(x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    heads_first = x.unflatten(1, (shard.size, -1)).transpose(0, 1)
    return _all_to_all(heads_first, shard).flatten(0, 1)[shard.restore_index]


def _to_positions(x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    ranks_first = x[shard.gathered_positions].unflatten(0, (shard.size, -1))
    return _all_to_all(ranks_first, shard).transpose(0, 1).flatten(1, 2)


def _all_to_all(parts: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """[cp, ...]: part r goes to rank r, and what rank r had for this one takes its place."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=shard.group)
    return received
