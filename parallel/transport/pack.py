"""Copy and hash the rectangles of chunks: `ChunkPacker` packs them into flat buffers, unpacks them, and hashes them on the way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from parallel.chunking import Chunk
from parallel.digest import ByteMatrix, Hash, view_bytes
from parallel.shards import NamedRect
from parallel.transport.delta import MOST_CHANGED, decode, encode

_HASH_BYTES = 256 << 10
"""Rows are hashed and copied in batches of this size: on the machine where it was measured, hashing 256 KiB just before they are copied
costs 5 % of the copy; later, 100 %."""


class Stopwatch:
    """Adds up the seconds of repeated work. On a GPU, which works on while Python continues, it measures with events."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, on_gpu: bool) -> Iterator[None]:
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """On a GPU, waits until all of the work is done."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3


class Difference(NamedTuple):
    """How a chunk differs from its base."""

    digest: str
    """Of the chunk; empty without hashing."""
    changed: int
    """Bytes."""
    delta: np.ndarray | None
    """None where so much differs that the chunk is better sent as it is."""


class ChunkPacker:
    """Named tensors as byte matrices, made once per sync, which chunks are copied from and to and hashed in."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        """Raises ValueError, by name, for a tensor that is missing or whose rows are not contiguous."""
        self._clock = Stopwatch()
        self._matrices: dict[str, tuple[ByteMatrix, int]] = {}
        for name in names:
            if name not in tensors:
                raise ValueError(f"there is no tensor {name}")
            try:
                self._matrices[name] = view_bytes(tensors[name]), tensors[name].element_size()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None

    @property
    def hash_seconds(self) -> float:
        """Seconds spent on hashing so far; on a GPU, waits until that is done."""
        return self._clock.seconds

    def view_named_rect(self, named_rect: NamedRect) -> ByteMatrix:
        """Return the bytes of a rectangle, a view."""
        name, rect = named_rect
        matrix, size = self._matrices[name]
        return matrix[rect.row : rect.row + rect.rows, rect.col * size : (rect.col + rect.cols) * size]

    def pack(self, named_rects: Iterable[NamedRect], flat: ByteMatrix, hashing: bool) -> str:
        """Copy rectangles into `flat`, uint8 [bytes], one after the other.

        Where `hashing`, returns the `Hash` of the rectangles' bytes in that order, as 32 hex digits; else an empty text.
        """
        digest = Hash() if hashing else None
        for rows, part in self._iter_parts(named_rects, flat):
            self._update(digest, rows)
            part[...] = rows
        return digest.hexdigest() if digest else ""

    def unpack(self, named_rects: Iterable[NamedRect], flat: ByteMatrix, hashing: bool) -> str:
        """Copy `flat` back into rectangles; the hash is of what the rectangles hold after they were written."""
        digest = Hash() if hashing else None
        for rows, part in self._iter_parts(named_rects, flat):
            rows[...] = part
            self._update(digest, rows)
        return digest.hexdigest() if digest else ""

    def copy(self, named_rects: Sequence[NamedRect], source: ChunkPacker, hashing: bool) -> str:
        """Copy the same rectangles from `source`; hash as `unpack` does."""
        digest = Hash() if hashing else None
        for rows, source_rows in zip(self._iter_rows(named_rects), source._iter_rows(named_rects), strict=True):
            rows[...] = source_rows
            self._update(digest, rows)
        return digest.hexdigest() if digest else ""

    def compare(self, named_rects: Iterable[NamedRect], base: np.ndarray, hashing: bool) -> Difference:
        """Compare rectangles with `base`, uint8 [bytes], which holds their bytes afterwards; hash as `pack` does. On the host only."""
        digest = Hash() if hashing else None
        positions, values, changed, offset = [np.empty(0, np.int64)], [np.empty(0, np.uint8)], 0, 0
        for rows, part in self._iter_parts(named_rects, base):
            self._update(digest, rows)
            differs = rows != part
            changed += (count := int(np.count_nonzero(differs)))
            if changed > len(base) * MOST_CHANGED:
                part[...] = rows
            elif count:
                found = np.flatnonzero(differs)
                matrix, places = _index(rows, found)
                values.append(matrix[places])
                positions.append(found + offset)
                part.reshape(-1)[found] = values[-1]
            offset += rows.size
        dense = changed > len(base) * MOST_CHANGED
        delta = None if dense else encode(np.concatenate(positions), np.concatenate(values), len(base))
        return Difference(digest.hexdigest() if digest else "", changed, delta)

    def apply(self, named_rects: Iterable[NamedRect], delta: np.ndarray, nbytes: int, hashing: bool) -> str:
        """Write a delta into rectangles of `nbytes` bytes; hash all of them as `unpack` does. Raise ValueError where it does not fit."""
        digest = Hash() if hashing else None
        positions, values = decode(delta, nbytes)
        first, offset = 0, 0
        for rows in self._iter_rows(named_rects):
            last = first + int(np.searchsorted(positions[first:], offset + rows.size))
            if last > first:
                matrix, places = _index(rows, positions[first:last] - offset)
                matrix[places] = values[first:last]
            self._update(digest, rows)
            first, offset = last, offset + rows.size
        return digest.hexdigest() if digest else ""

    def hash_all(self, chunks: Sequence[Sequence[NamedRect]]) -> list[str]:
        """Return the hash of every chunk's rectangles as they are now. On the host, uses one core: others generate meanwhile."""

        digests = [Hash() for _ in chunks]
        for digest, named_rects in zip(digests, chunks, strict=True):  # a GPU starts all work before one waits for the first
            for rows in self._iter_rows(named_rects):
                self._update(digest, rows)
        return [digest.hexdigest() for digest in digests]

    def _update(self, digest: Hash | None, rows: ByteMatrix) -> None:
        if digest is not None:
            with self._clock.running(on_gpu=not isinstance(rows, np.ndarray)):
                digest.update(rows)

    def _iter_parts(self, named_rects: Iterable[NamedRect], flat: ByteMatrix) -> Iterator[tuple[ByteMatrix, ByteMatrix]]:
        """Yield `_iter_rows`, each with its place in `flat`. Raise ValueError where the other side counted other bytes, `len(flat)`."""
        offset = 0
        for rows in self._iter_rows(named_rects):
            end = offset + rows.shape[0] * rows.shape[1]
            yield rows, flat[offset:end].reshape(rows.shape)
            offset = end
        if offset != len(flat):
            raise ValueError(f"a chunk's rectangles are {offset} bytes here, {len(flat)} on the other side")

    def _iter_rows(self, named_rects: Iterable[NamedRect]) -> Iterator[ByteMatrix]:
        """Yield the rectangles in batches of rows that are hashed while a core's cache still holds them; on a GPU, uncut."""
        for named_rect in named_rects:
            matrix = self.view_named_rect(named_rect)
            rows, row_bytes = matrix.shape
            step = max(_HASH_BYTES // row_bytes, 1) if isinstance(matrix, np.ndarray) else rows
            for row in range(0, rows, step):
                yield matrix[row : row + step]


def _index(rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return a view of a matrix and what selects its elements at these positions, counted row by row; whole rows need no division."""
    return (rows.reshape(-1), positions) if rows.flags.c_contiguous else (rows, np.divmod(positions, rows.shape[1]))


def make_source_packer(named_tensors: Mapping[str, torch.Tensor], chunks: Sequence[Chunk], rank: int) -> ChunkPacker:
    """Return a packer of trainer rank `rank`'s tensors, as far as its chunks need them."""
    return ChunkPacker(named_tensors, {name for chunk in chunks if chunk.source == rank for name, _ in chunk.sources})


def make_target_packer(tensors: Mapping[str, torch.Tensor], chunks: Sequence[Chunk]) -> ChunkPacker:
    """Return a packer of an engine rank's tensors, as far as its chunks need them."""
    return ChunkPacker(tensors, {name for chunk in chunks for name, _ in chunk.targets})


def check_targets(packer: ChunkPacker, chunks: Sequence[Chunk]) -> None:
    """Raise ValueError, by name, where chunks do not fit an engine rank's tensors. Touches nothing."""
    for chunk in chunks:
        nbytes = 0
        for name, rect in chunk.targets:
            rows, row_bytes = packer.view_named_rect((name, rect)).shape
            if min(rect) < 0 or rows != rect.rows:
                raise ValueError(f"{name}: rows {rect.row}..{rect.row + rect.rows - 1} lie outside")
            nbytes += rows * row_bytes
        if nbytes != chunk.nbytes:
            raise ValueError(f"{chunk.targets[0][0]} and its neighbours are {nbytes} bytes in the engine, {chunk.nbytes} are coming")
