"""Sequence packing: which sequences share a micro-batch, and which positions of it a context-parallel rank computes.

Bins hold about equally many tokens, and every data-parallel replica gets the same number of them.
"""

from __future__ import annotations

import heapq
from itertools import accumulate, pairwise

LOGITS_PER_CHUNK = 1 << 25
"""Logits that a trainer's rank holds at a time (`mcore.logprobs`): 128 MiB in FP32. Of the largest vocabularies, 152K tokens, that is 220
rows for each reading of the output layer's weight, about as many as keep a GPU's matrix units busy for as long as the reading takes."""


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def pack(lengths: list[int], max_tokens: int, replicas: int = 1) -> list[list[int]]:
    """Return indices of `lengths` in bins of at most `max_tokens` tokens; a longer sequence gets a bin of its own.

    The number of bins is a multiple of `replicas`. The fullest come first, so that dealing them out in rounds gives every replica a bin
    of about the same size. The longest sequences are placed first, each into the emptiest bin (Graham's LPT rule), so two bins differ by
    at most the longest sequence. Bins left without a sequence are empty.
    """
    if not lengths:
        return []
    max_bins = round_up(len(lengths), replicas)
    count = min(round_up(max(-(-sum(lengths) // max_tokens), 1), replicas), max_bins)
    bins = _fill(lengths, count)
    while any(len(members) > 1 and load > max_tokens for load, members in bins):
        count = min(count + round_up(max(count // 8, 1), replicas), max_bins)  # an eighth more: few tries, however many sequences
        bins = _fill(lengths, count)
    return [members for _, members in sorted(bins, key=lambda filled: -filled[0])]


def context_parallel_positions(lengths: list[int], rank: int, size: int) -> list[int]:
    """Return the positions of a row that rank `rank` of `size` context-parallel ranks computes; `lengths` are those of its sequences.

    Every sequence is cut into 2 * size equal chunks, so its length must be a multiple of that; rank r computes chunk r from the start
    and chunk r from the end. This is Megatron's order, which its rotary embedding of packed sequences relies on.
    """
    positions: list[int] = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        chunk = (end - start) // (2 * size)
        positions += range(start + rank * chunk, start + (rank + 1) * chunk)
        positions += range(end - (rank + 1) * chunk, end - rank * chunk)
    return positions


def _fill(lengths: list[int], count: int) -> list[tuple[int, list[int]]]:
    """Return (tokens, indices) of `count` bins, however full."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (load + lengths[index], number))
    return [(load, bins[number]) for load, number in loads]
