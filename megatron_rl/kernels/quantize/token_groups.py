"""Tokens sorted by expert, with the rows of each expert padded with zeros to a multiple of 128, so that no block holds two experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.kernels.device_copy import copy_to_device
from parallel.formats import BLOCK


@dataclass(frozen=True)
class TokenGroups:
    """Tables of n tokens in T padded rows, for kernels of grouped products and kernels that spread tokens. If the host knows the counts, it
    builds the tables and sends them in one copy without waiting for the device. Otherwise (`kernels.experts.reference.group_parts`), the
    tables that only WGrad reads are empty: `lengths`, `sizes`, and `tiles`."""

    lengths: list[int]  # rows of each expert; multiples of 128, possibly 0
    places: torch.Tensor  # int64 `[n]`: row of each token
    sources: torch.Tensor  # int32 `[T]`: token of each row, or -1 for padding
    experts: torch.Tensor  # int32 `[T]`: expert of each row, or -1 behind the last group
    sizes: torch.Tensor  # int32 `[E]`: `lengths` on the device
    tiles: tuple[torch.Tensor, torch.Tensor]  # int64 `[T / 128]` each: first row and length of the group of every 128 consecutive rows

    @classmethod
    def from_counts(cls, counts: torch.Tensor | Sequence[int], device: torch.device | str) -> TokenGroups:
        """Return the groups of `counts` `[E]` tokens sorted by expert, or of `[S, E]` tokens sorted by source rank, then by expert. Counts
        are on the host."""
        chunks = np.asarray(counts, dtype=np.int64)
        chunks = chunks.reshape(-1, chunks.shape[-1])
        sizes = (chunks.sum(0) + BLOCK - 1) // BLOCK * BLOCK
        starts, lengths = sizes.cumsum() - sizes, chunks.ravel()
        firsts = (starts + chunks.cumsum(0) - chunks).ravel()
        n, rows, experts = int(lengths.sum()), int(sizes.sum()), len(sizes)
        parts = [rows // BLOCK, rows // BLOCK, rows // 2, rows // 2, n, (experts + 1) // 2]  # lengths in int64; three parts hold int32
        table = np.empty(sum(parts), np.int64)
        first, length, *narrow, places, of_experts = np.split(table, np.cumsum(parts[:-1]))
        first[:], length[:] = (values.repeat(sizes // BLOCK) for values in (starts, sizes))
        places[:] = np.arange(n) + (firsts - (lengths.cumsum() - lengths)).repeat(lengths)
        sources, of_rows, padded = (part.view(np.int32) for part in (*narrow, of_experts))
        sources[:] = -1
        sources[places] = np.arange(n)
        of_rows[:], padded[:experts] = np.arange(experts).repeat(sizes), sizes
        sent = copy_to_device(torch.from_numpy(table), torch.device(device)).split(parts)
        halves = [part.view(torch.int32) for part in (sent[2], sent[3], sent[5])]
        return cls(sizes.tolist(), sent[4], halves[0], halves[1], halves[2][:experts], (sent[0], sent[1]))

    @property
    def rows(self) -> int:
        return len(self.experts)
