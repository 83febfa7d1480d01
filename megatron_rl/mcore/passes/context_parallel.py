"""Context parallelism: ranks share the positions of every packed sequence and exchange positions for heads around the attention.

`batch.packing.context_parallel_positions` assigns the positions. Operators that work per token need no change. For the attention, an
all-to-all gives each rank all positions of h / cp heads (DeepSpeed-Ulysses, arXiv 2309.14509). The same operator then computes the same
bits as without context parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.batch.packing import context_parallel_positions
from megatron_rl.kernels.device_copy import copy_to_device
from megatron_rl.mcore.base.exchange import Pending, exchange, pend


@dataclass(frozen=True)
class ContextShard:
    """The positions of a row of length t that one context-parallel rank computes; the whole row if cp = 1."""

    group: Any
    own_positions: torch.Tensor  # int64 [t / cp]: this rank's positions
    gathered_positions: torch.Tensor  # int64 [t]: the positions of all ranks, in rank order
    restore_index: torch.Tensor  # int64 [t]: index of each position in `gathered_positions`

    @classmethod
    def for_this_rank(cls, lengths: list[int]) -> ContextShard:
        """Return the shard of a row that holds sequences of the given lengths, on the CPU."""
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        if size == 1:
            positions = torch.arange(sum(lengths)).unsqueeze(0)
        else:
            positions = torch.tensor([context_parallel_positions(lengths, rank, size) for rank in range(size)])
        gathered_positions = positions.flatten()
        return cls(group, positions[group.rank()], gathered_positions, gathered_positions.argsort())

    def to(self, device: torch.device) -> ContextShard:
        """Return a copy on `device`."""
        return ContextShard(
            self.group, *(copy_to_device(x, device) for x in (self.own_positions, self.gathered_positions, self.restore_index))
        )

    @property
    def size(self) -> int:
        return self.group.size()

    def select(self, row: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [1, t / cp] of a row [1, t]."""
        return row if self.size == 1 else row[:, self.own_positions]

    def gather_row(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the parts [1, t / cp] of all ranks into the row [1, t], with gradient. All ranks must compute the same loss from it."""
        return part if self.size == 1 else _GatherRow.apply(part, self)

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Exchange [t / cp, h, d] of this rank's positions for [t, h / cp, d] of this rank's heads, with gradient. The other micro-batch
        has its turn meanwhile."""
        rows = len(self.gathered_positions)
        shapes = [(rows, x.shape[1] // self.size, *x.shape[2:]) for x in tensors]
        return exchange(tensors, shapes, partial(_start_to_heads, shard=self), partial(_start_to_positions, shard=self))

    def to_positions(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `to_heads`."""
        shape = (len(self.own_positions), x.shape[1] * self.size, *x.shape[2:])
        (result,) = exchange([x], [shape], partial(_start_to_positions, shard=self), partial(_start_to_heads, shard=self))
        return result

    def repeat_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat each head of keys or values [t, g, d] until cp divides the number of heads. Queries still find their head."""
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
        return ctx.shard.select(gradient), None  # all ranks compute the same loss, so there is nothing to sum


def _start_to_heads(x: torch.Tensor, shard: ContextShard) -> Pending:
    finish = _start_all_to_all(x.unflatten(1, (shard.size, -1)).transpose(0, 1), shard)
    return lambda: finish().flatten(0, 1)[shard.restore_index]


def _start_to_positions(x: torch.Tensor, shard: ContextShard) -> Pending:
    finish = _start_all_to_all(x[shard.gathered_positions].unflatten(0, (shard.size, -1)), shard)
    return lambda: finish().transpose(0, 1).flatten(1, 2)


def _start_all_to_all(parts: torch.Tensor, shard: ContextShard) -> Pending:
    """Start to exchange [cp, ...]: part r goes to rank r; part r of the result comes from rank r."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    return pend(dist.all_to_all_single(received, sent, group=shard.group, async_op=True), received)
