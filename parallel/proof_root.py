"""The root of a proof: one number of fixed size for all digests of an engine rank's chunks, whoever has them. A trainer rank folds the
digests of what it sends to an engine rank, and the sum over the trainer ranks, which a reduction adds up along a tree, must be the engine
rank's own fold. So no rank sees the digests of others, and a difference names the engine rank. Folds are summed in four lanes of 32 bits,
of which each keeps its remainder. Two different lists of digests have the same root with a probability of 2^-128."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import xxhash

_LANES, _MASK = range(0, 128, 32), (1 << 32) - 1
ROOT_NUMBERS = 1 + len(_LANES)
Root = Sequence[int]
"""The number of chunks that were hashed, and four lanes."""


def fold_digests(target: int, digests: Iterable[tuple[int, str]]) -> list[int]:
    """Return the root of some chunks of engine rank `target`. `digests`: trainer rank and digest of each chunk, in the order in which the
    trainer rank sends them. A chunk without a digest counts as not hashed."""
    by_source: dict[int, list[str]] = defaultdict(list)
    for source, digest in digests:
        by_source[source].append(digest)
    root = [0] * ROOT_NUMBERS
    for source, own in by_source.items():
        folded = xxhash.xxh3_128(f"{source} {target} {' '.join(own)}".encode()).intdigest()
        root = add_roots(root, [sum(map(bool, own)), *(folded >> lane & _MASK for lane in _LANES)])
    return root


def add_roots(a: Root, b: Root) -> list[int]:
    """Return the root of the chunks of both."""
    return reduce_root([x + y for x, y in zip(a, b, strict=True)])


def reduce_root(numbers: Root) -> list[int]:
    """Return the root whose lanes were summed without a remainder, over fewer than 2^31 ranks."""
    return [numbers[0], *(number & _MASK for number in numbers[1:])]
