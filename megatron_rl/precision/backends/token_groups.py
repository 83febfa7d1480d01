"""Tokens sorted by expert, those of each padded with zeros to a multiple of 128, so that no block holds two experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.precision.ops.device_copy import copy_to_device
from parallel.formats import BLOCK


@dataclass(frozen=True)
class TokenGroups:
    """The tables of n tokens in T padded rows that kernels of grouped products read. They are made on the host, where the counts are
    known, and sent without waiting for the device."""

    lengths: list[int]
    """Rows of each expert, multiples of 128, 0 allowed."""
    places: torch.Tensor
    """int64 [n]: each token's row."""
    experts: torch.Tensor
    """int32 [T]: each row's expert."""
    sizes: torch.Tensor
    """int32 [E]: `lengths`."""
    tiles: tuple[torch.Tensor, torch.Tensor]
    """int64 [T / 128] each: first row and length of the group that 128 consecutive rows belong to."""

    @classmethod
    def from_counts(cls, counts: Sequence[int], device: torch.device | str) -> TokenGroups:
        """Return the groups of `counts` tokens."""
        tokens = torch.tensor(list(counts), dtype=torch.long)
        sizes = (tokens + BLOCK - 1) // BLOCK * BLOCK
        starts, numbers = sizes.cumsum(0) - sizes, torch.arange(len(tokens))
        shifts = starts - (tokens.cumsum(0) - tokens)
        places = torch.arange(int(tokens.sum())) + shifts.repeat_interleave(tokens)
        tiles = (column.repeat_interleave(sizes // BLOCK) for column in (starts, sizes))
        tables = places, numbers.int().repeat_interleave(sizes), sizes.int(), *tiles
        places, experts, lengths, *of_tiles = (copy_to_device(table, torch.device(device)) for table in tables)
        return cls(sizes.tolist(), places, experts, lengths, (of_tiles[0], of_tiles[1]))

    @property
    def rows(self) -> int:
        """T."""
        return len(self.experts)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [T, h], padding zero, with gradient."""
        return _Move.apply(x, self, True)

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `spread`, with gradient."""
        return _Move.apply(x, self, False)


class _Move(torch.autograd.Function):
    """One of the two moves below; its gradient takes the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: TokenGroups, to_rows: bool) -> torch.Tensor:
        ctx.groups, ctx.to_rows = groups, to_rows
        return _to_rows(x, groups) if to_rows else x.index_select(0, groups.places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        groups = ctx.groups
        return gradient.index_select(0, groups.places) if ctx.to_rows else _to_rows(gradient, groups), None, None


def _to_rows(x: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
    return x.new_zeros(groups.rows, x.shape[1]).index_copy_(0, groups.places, x)
