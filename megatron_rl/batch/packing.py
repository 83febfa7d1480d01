"""Sequence packing: assigns sequences to data-parallel replicas and micro-batches, and token positions to context-parallel ranks. Both are
balanced by cost, s (1 + s / `ModelGeometry.attention_length`) for a sequence of s tokens: products with weights grow with s, attention with
its square."""

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

VALUE_ROWS = 1024  # rows of FP32 hidden states that a value head computes at a time
LOGITS_PER_CHUNK, LOGITS_PER_GPU_CHUNK = 1 << 25, 1 << 27
"""Logits that a trainer rank holds at a time (`mcore.passes.logprobs`): 128 MiB in FP32 on CPUs, 256 MiB in BF16 on GPUs."""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def compute_costs(lengths: Sequence[int], attention_length: float = math.inf) -> list[float]:
    return [length * (1 + length / attention_length) for length in lengths]


def deal(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """Return the indices of each replica's sequences, ascending. The costs of two replicas differ by at most the costliest sequence.
    Sequences are placed in order of falling cost, each on the replica with the lowest cost so far (Graham's LPT rule)."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0.0, replica) for replica in range(replicas)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, replica = loads[0]
        shares[replica].append(index)
        heapq.heapreplace(loads, (load + costs[index], replica))
    return [sorted(share) for share in shares]


def pack(
    lengths: Sequence[int], max_tokens: int, multiple: int = 1, at_least: int = 0, costs: Sequence[float] | None = None
) -> list[list[int]]:
    """Return the indices of `lengths` in bins of at most `max_tokens` tokens. A longer sequence gets its own bin. The number of bins is a
    multiple of `multiple` and at least `at_least`; some bins may be empty. Sequences are placed in order of falling cost (default: length),
    each into the cheapest bin that has room. The costliest bins come first."""
    costs = lengths if costs is None else costs
    fewest, most = (round_up(number, multiple) for number in (at_least, max(len(lengths), at_least)))
    count = min(max(round_up(-(-sum(lengths) // max_tokens), multiple), fewest, multiple if lengths else 0), most)
    while (bins := _fill(lengths, costs, count, max_tokens)) is None:
        count = min(count + round_up(max(count // 8, 1), multiple), most)  # grow by an eighth, so that few tries are needed
    return [members for _, members in sorted(bins, key=lambda filled: -filled[0])]


def context_parallel_positions(lengths: list[int], rank: int, size: int) -> list[int]:
    """Return the positions of a row that context-parallel rank `rank` of `size` computes. `lengths`: lengths of the row's sequences. Every
    sequence is cut into 2 * size equal chunks, so its length must be a multiple of that. Rank r computes chunk r from the start and chunk r
    from the end, which is the order that Megatron's rotary embedding of packed sequences expects."""
    positions: list[int] = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        chunk = (end - start) // (2 * size)
        positions += range(start + rank * chunk, start + (rank + 1) * chunk)
        positions += range(end - (rank + 1) * chunk, end - rank * chunk)
    return positions


def _fill(lengths: Sequence[int], costs: Sequence[float], count: int, max_tokens: int) -> list[tuple[float, list[int]]] | None:
    """Return (cost, indices) of `count` bins, or None if a sequence does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens, final_costs, shortest = [0] * count, [0.0] * count, min(lengths, default=0)
    open_bins: list[tuple[float, int]] = [(0.0, number) for number in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -costs[index]):
        full = []
        while open_bins and bins[open_bins[0][1]] and tokens[open_bins[0][1]] + lengths[index] > max_tokens:
            full.append(heapq.heappop(open_bins))
        if not open_bins:
            return None
        cost, number = heapq.heappop(open_bins)
        bins[number].append(index)
        tokens[number] += lengths[index]
        final_costs[number] = cost + costs[index]
        for filled in (*full, (final_costs[number], number)):
            if tokens[filled[1]] + shortest <= max_tokens:  # full bins are never looked at again
                heapq.heappush(open_bins, filled)
    return list(zip(final_costs, bins, strict=True))
