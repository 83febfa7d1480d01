"""What a trainer rank sent and proved last, so that the next sync sends only the bytes that differ from it (`parallel.transport.delta`).

The base is a copy in host memory of what this rank sends: one byte for a weight in FP8, two in BF16, and no more than its shard, as engines
that get the same chunk share an entry. It is only ever a guess of what an engine holds: the proof hashes all bytes of the live weights at
both ends, whatever was sent. A guess that was wrong is forgotten, and everything is sent.
"""

from __future__ import annotations

import numpy as np

from parallel.chunking import Chunk
from parallel.shards import NamedRect
from parallel.transport.pack import ChunkPacker, Difference

WORTH_IT = 1 / 2
"""`sync.delta = "auto"` sends deltas where they are at most this share of all bytes; to make them takes time as well."""


class DeltaBase:
    """The bytes of one rank's chunks as engines hold them; empty before a proved sync."""

    def __init__(self) -> None:
        self._flats: dict[tuple[NamedRect, ...], np.ndarray] = {}
        self.proved = False
        """Whether every engine held exactly these bytes when they were last looked at."""

    def remember(self, chunk: Chunk, flat: np.ndarray) -> None:
        """Copy the bytes of a chunk that is sent as it is."""
        if chunk.sources in self._flats:
            self._flats[chunk.sources][...] = flat
        else:
            self._flats[chunk.sources] = flat.copy()

    def compare(self, packer: ChunkPacker, numbered: dict[int, Chunk], hashing: bool) -> dict[int, Difference]:
        """Return, by number, how the live bytes of chunks differ from the base, which holds them afterwards. Once for chunks of the same
        bytes."""
        found: dict[tuple[NamedRect, ...], Difference] = {}
        for chunk in numbered.values():
            if chunk.sources not in found:
                found[chunk.sources] = packer.compare(chunk.sources, self._flats[chunk.sources], hashing)
        return {number: found[chunk.sources] for number, chunk in numbered.items()}

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flats.values())
