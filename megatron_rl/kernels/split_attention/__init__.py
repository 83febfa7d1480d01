"""Attention whose bits depend on a row's own keys alone, by their absolute positions: one kernel for packed sequences in the trainer, and
for prompts, chunks behind a prefix, and decoded tokens in the engine. It has never run on a GPU."""

from typing import NamedTuple

import torch

ROWS, KEYS = 64, 64  # of a tile
SPLIT = 2048  # keys that are summed by themselves, from a multiple of this number
ORDER = f"splits of {SPLIT} keys at absolute positions, blocks of {KEYS} ascending, tiles of {ROWS} rows"


class Sequences(NamedTuple):
    """Where the queries and keys of n sequences lie. Queries are the last tokens of their sequence, one sequence after the other."""

    starts: torch.Tensor  # integers [n + 1]: first query of each sequence, and their number
    key_counts: torch.Tensor  # integers [n]: tokens of a sequence, those of its queries included
    rows: torch.Tensor  # integers [n]: keys of sequence i lie in the slots from `slots[rows[i] * row_stride]` on
    slots: torch.Tensor  # int32, contiguous
    row_stride: int
    longest: int  # upper bound of a sequence's queries
    splits: int = 0
    """For one query per sequence: upper bound of the splits of its keys, which are then computed at the same time. 0: one by one."""


def pack(starts: torch.Tensor, longest: int, tokens: int) -> Sequences:
    """Describe whole sequences in a row of `tokens`. `starts` int32 [n + 1] holds their starts and the end of the last."""
    slots = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    return Sequences(starts, starts.diff(), starts[:-1], slots, 1, longest)
