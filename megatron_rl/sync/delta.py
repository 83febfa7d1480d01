"""Delta syncs: a trainer rank remembers the bytes of its last proved sync and sends only the bytes that changed since.

The base is a copy in host memory of the chunks that this rank sends. Engines that get the same chunk share one copy, so the base is at
most as large as the rank's shard. The base is only an assumption about the engine: the proof hashes all live bytes on both sides, and a
wrong base is discarded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.distributed import gather_from_ranks
from parallel.chunking import Chunk
from parallel.shards import NamedRect
from parallel.transport.pack import ChunkPacker, Difference

MAX_DELTA_SHARE = 1 / 2
"""`sync.delta = "auto"` sends deltas if they take at most this share of all bytes, because making deltas takes time as well."""


@dataclass(frozen=True)
class Changes:
    """How the chunks of all ranks differ from the base."""

    own: dict[int, Difference]  # differences of this rank's chunks, by chunk number
    sizes: list[int]  # bytes to send for every chunk of the plan: the size of its delta, or of the whole chunk
    changed_share: float  # share of all bytes that differ from the base


class DeltaBase:
    """The bytes of one rank's chunks as the engines are assumed to hold them. Empty before the first sync."""

    def __init__(self) -> None:
        self._flats: dict[tuple[NamedRect, ...], np.ndarray] = {}

    def remember(self, chunk: Chunk, flat: np.ndarray) -> None:
        """Copy the bytes of a chunk that is sent as a whole."""
        if chunk.sources in self._flats:
            self._flats[chunk.sources][...] = flat
        else:
            self._flats[chunk.sources] = flat.copy()

    def compare(self, packer: ChunkPacker, chunks: dict[int, Chunk], hashing: bool) -> dict[int, Difference]:
        """Compare the live bytes of numbered chunks with the base, and store them in it. Chunks with the same sources are read once."""
        found: dict[tuple[NamedRect, ...], Difference] = {}
        for chunk in chunks.values():
            if chunk.sources not in found:
                found[chunk.sources] = packer.compare(chunk.sources, self._flats[chunk.sources], hashing)
        return {number: found[chunk.sources] for number, chunk in chunks.items()}

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flats.values())


def gather_changes(own: dict[int, Difference], chunks: tuple[Chunk, ...]) -> Changes:
    """Combine the differences of all ranks' chunks. Collective."""
    own_sizes = {number: chunks[number].nbytes if found.delta is None else len(found.delta) for number, found in own.items()}
    gathered = gather_from_ranks((own_sizes, sum(found.changed for found in own.values())))
    sizes = {number: size for rank_sizes, _ in gathered for number, size in rank_sizes.items()}
    changed = sum(rank_changed for _, rank_changed in gathered)
    return Changes(own, [sizes[number] for number in range(len(chunks))], changed / sum(chunk.nbytes for chunk in chunks))
