"""Deltas: of a chunk that an engine rank holds already, the bytes that differ, each by its position and its value. numpy only.

A step of Adam at a learning rate of 1e-6 changes 0.07 % of a policy's E4M3 bytes, evenly: some 11 in every 128x128 block, so no block stays
as it was, and single bytes are what is worth sending. Positions take two bytes, as they count within pages of 64 KiB:

    uint32 [pages]      how many bytes of each page differ
    uint16 [differing]  where in their page, ascending, page after page
    uint8 [differing]   what they are now

Nothing differs: an empty delta. Numbers are little-endian.
"""

from __future__ import annotations

import numpy as np

_PAGE_BITS = 16
MOST_CHANGED = 1 / 8
"""A chunk in which a larger share of bytes differs is sent as it is: a delta of it is less than half as large, and takes longer to make
than most networks take for the rest. Up to there a delta is always smaller than its chunk."""


def encode(positions: np.ndarray, values: np.ndarray, nbytes: int) -> np.ndarray:
    """Return the delta, uint8, of a chunk of `nbytes`: at ascending `positions` (int64 [n]) it has other `values` (uint8 [n]) now."""
    if not len(positions):
        return np.empty(0, np.uint8)
    counts = np.bincount(positions >> _PAGE_BITS, minlength=_count_pages(nbytes)).astype("<u4")
    within = (positions & ((1 << _PAGE_BITS) - 1)).astype("<u2")
    return np.concatenate([counts.view(np.uint8), within.view(np.uint8), values])


def decode(delta: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions, values) of `encode`. Raise ValueError where that is no delta of a chunk of `nbytes`."""
    if not len(delta):
        return np.empty(0, np.int64), delta
    head = 4 * (pages := _count_pages(nbytes))
    counts = delta[:head].view("<u4") if len(delta) >= head else np.zeros(0, np.uint32)
    if len(delta) != head + 3 * (count := int(counts.sum(dtype=np.int64))):
        raise ValueError(f"{len(delta)} bytes are no delta of a chunk of {nbytes}")
    positions = np.repeat(np.arange(pages, dtype=np.int64) << _PAGE_BITS, counts) + delta[head : head + 2 * count].view("<u2")
    if count and (positions[-1] >= nbytes or np.any(positions[1:] <= positions[:-1])):
        raise ValueError(f"the positions in a delta of a chunk of {nbytes} bytes do not ascend within it")
    return positions, delta[head + 2 * count :]


def _count_pages(nbytes: int) -> int:
    return -(-nbytes >> _PAGE_BITS)
