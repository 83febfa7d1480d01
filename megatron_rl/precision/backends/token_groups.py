"""Tokens sorted by expert, those of each padded with zeros to a multiple of 128, so that no block holds two experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.precision.ops.device_copy import copy_to_device
from parallel.formats import BLOCK


@dataclass(frozen=True)
class TokenGroups:
    """The tables of n tokens in T padded rows that kernels of grouped products read, and those that spread tokens as they quantize them.
    They are made on the host, where the counts are known, and sent without waiting for the device."""

    lengths: list[int]
    """Rows of each expert, multiples of 128, 0 allowed."""
    places: torch.Tensor
    """int64 [n]: each token's row."""
    sources: torch.Tensor
    """int32 [T]: each row's token, -1 for padding."""
    experts: torch.Tensor
    """int32 [T]: each row's expert."""
    sizes: torch.Tensor
    """int32 [E]: `lengths`."""
    tiles: tuple[torch.Tensor, torch.Tensor]
    """int64 [T / 128] each: first row and length of the group that 128 consecutive rows belong to."""

    @classmethod
    def from_counts(cls, counts: torch.Tensor | Sequence[int], device: torch.device | str) -> TokenGroups:
        """Return the groups of `counts` [E] tokens, sorted by expert; or of [S, E], sorted by the S ranks that they came from, and those of
        each by expert. Counts are on the host."""
        chunks = torch.as_tensor(counts, dtype=torch.long)
        chunks = chunks.view(-1, chunks.shape[-1])
        sizes = (chunks.sum(0) + BLOCK - 1) // BLOCK * BLOCK
        starts, numbers = sizes.cumsum(0) - sizes, torch.arange(len(sizes))
        firsts, lengths = (starts + chunks.cumsum(0) - chunks).flatten(), chunks.flatten()
        tokens = torch.arange(int(lengths.sum()))
        places = tokens + (firsts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
        sources = torch.full((int(sizes.sum()),), -1).index_copy_(0, places, tokens)
        tiles = (column.repeat_interleave(sizes // BLOCK) for column in (starts, sizes))
        tables = places, sources.int(), numbers.int().repeat_interleave(sizes), sizes.int(), *tiles
        places, sources, experts, of_experts, *of_tiles = (copy_to_device(table, torch.device(device)) for table in tables)
        return cls(sizes.tolist(), places, sources, experts, of_experts, (of_tiles[0], of_tiles[1]))

    @property
    def rows(self) -> int:
        """T."""
        return len(self.experts)
