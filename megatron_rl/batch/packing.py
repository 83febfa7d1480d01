"""Which sequences share a micro-batch: bins of about equally many tokens, as many for every data-parallel replica; and which places of it
a context-parallel rank computes."""

from __future__ import annotations

import heapq
from itertools import accumulate, pairwise


def pack(lengths: list[int], bound: int, replicas: int = 1) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `bound` tokens; a longer sequence has a bin of its own. The number of bins is a multiple
    of `replicas`, and the fullest come first: dealt out like cards, those of one round are alike.

    The longest sequences are placed first, each into the bin that holds least (Graham's LPT rule), so that two bins differ by no more
    than the longest sequence. Bins that no sequence is left for are empty.
    """
    if not lengths:
        return []
    most = _round_up(len(lengths), replicas)
    count = min(_round_up(-(-sum(lengths) // bound), replicas), most)
    bins = _fill(lengths, count)
    while any(len(members) > 1 and load > bound for load, members in bins):
        count = min(count + _round_up(count // 8, replicas), most)  # an eighth more: few tries, however many sequences
        bins = _fill(lengths, count)
    return [members for _, members in sorted(bins, key=lambda filled: -filled[0])]


def context_parallel_positions(lengths: list[int], rank: int, size: int) -> list[int]:
    """The places of a row that one of `size` context-parallel ranks computes, of sequences of `lengths` places each.

    Every sequence is cut into 2 * size equal chunks, so its length must be a multiple; rank r has chunk r and the one that stands as far
    from the end. This is Megatron's way, whose rotary positions of packed sequences rely on it.
    """
    found: list[int] = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        chunk = (end - start) // (2 * size)
        found += range(start + rank * chunk, start + (rank + 1) * chunk)
        found += range(end - (rank + 1) * chunk, end - rank * chunk)
    return found


def _fill(lengths: list[int], count: int) -> list[tuple[int, list[int]]]:
    """(tokens, indices) of `count` bins, however full."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (load + lengths[index], number))
    return [(load, bins[number]) for load, number in loads]


def _round_up(number: int, multiple: int) -> int:
    """The next multiple, at least one of it."""
    return max(-(-number // multiple), 1) * multiple
