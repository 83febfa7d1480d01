"""Packs, unpacks, hashes and compares the rectangles of chunks, and encodes deltas of chunks.

A delta lists the bytes that changed in a chunk that an engine rank holds already. An Adam step at a learning rate of 1e-6 changes 0.07 % of
a policy's E4M3 bytes, about 11 per 128x128 block, so no block stays the same and single bytes are worth sending. Positions are relative
to pages of 64 KiB, so they take two bytes. All numbers are little-endian, and a delta without changes is empty:

    uint32 [pages]      number of changed bytes in each page
    uint16 [changed]    their positions in the page, ascending, page after page
    uint8 [changed]     their new values
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from parallel.chunking import Chunk
from parallel.digest import ByteMatrix, Hash, view_bytes
from parallel.shards import NamedRect

_HASH_BYTES = 256 << 10  # rows are hashed and copied in batches of this size, which stay in the cache
_PAGE_BITS = 16
MAX_CHANGED_SHARE = 1 / 8
"""A chunk in which a larger share of the bytes changed is sent as a whole: a delta would save little more than half, and takes longer to
make than most networks take for the rest. Below this share a delta is always smaller than its chunk."""


def encode_delta(positions: np.ndarray, values: np.ndarray, nbytes: int) -> np.ndarray:
    """Return the delta, uint8, of a chunk of `nbytes` with new `values` (uint8 [n]) at ascending `positions` (int64 [n])."""
    if not len(positions):
        return np.empty(0, np.uint8)
    counts = np.bincount(positions >> _PAGE_BITS, minlength=_count_pages(nbytes)).astype("<u4")
    within = (positions & ((1 << _PAGE_BITS) - 1)).astype("<u2")
    return np.concatenate([counts.view(np.uint8), within.view(np.uint8), values])


def decode_delta(delta: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions, values) of `encode_delta`. Raise ValueError for an invalid delta of a chunk of `nbytes`."""
    if not len(delta):
        return np.empty(0, np.int64), delta
    head = 4 * (pages := _count_pages(nbytes))
    counts = delta[:head].view("<u4") if len(delta) >= head else np.zeros(0, np.uint32)
    if len(delta) != head + 3 * (count := int(counts.sum(dtype=np.int64))):
        raise ValueError(f"{len(delta)} bytes are not a delta of a chunk of {nbytes}")
    positions = np.repeat(np.arange(pages, dtype=np.int64) << _PAGE_BITS, counts) + delta[head : head + 2 * count].view("<u2")
    if count and (positions[-1] >= nbytes or np.any(positions[1:] <= positions[:-1])):
        raise ValueError(f"the positions in a delta of a chunk of {nbytes} bytes do not ascend within it")
    return positions, delta[head + 2 * count :]


def _count_pages(nbytes: int) -> int:
    return -(-nbytes >> _PAGE_BITS)


class Difference(NamedTuple):
    """How a chunk differs from its base."""

    digest: str  # digest of the chunk; empty without hashing
    changed: int  # number of changed bytes
    delta: np.ndarray | None  # delta of the chunk, or None if so much changed that the whole chunk should be sent


class ChunkPacker:
    """Named tensors as byte matrices, from and to which chunks are copied, and in which they are hashed. Made once per sync. With
    `hashing`, the methods return the `Hash` of the rectangles' bytes, in order, as 32 hex digits; else an empty string."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        """Raises ValueError, naming the tensor, if one is missing or its rows are not contiguous."""
        self._seconds, self._events = 0.0, list[tuple[torch.cuda.Event, torch.cuda.Event]]()  # spent on hashing
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
        """Seconds spent on hashing so far. On a GPU, waits until hashing is done."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3

    def view_named_rect(self, named_rect: NamedRect) -> ByteMatrix:
        """Return a view of a rectangle's bytes."""
        name, rect = named_rect
        matrix, size = self._matrices[name]
        return matrix[rect.row : rect.row + rect.rows, rect.col * size : (rect.col + rect.cols) * size]

    def pack(self, named_rects: Iterable[NamedRect], flat: ByteMatrix, hashing: bool) -> str:
        """Copy rectangles into `flat`, uint8 [bytes], one after the other."""
        digest = Hash() if hashing else None
        for rows, part in self._iter_parts(named_rects, flat):
            self._update(digest, rows)
            part[...] = rows
        return digest.hexdigest() if digest else ""

    def unpack(self, named_rects: Iterable[NamedRect], flat: ByteMatrix, hashing: bool) -> str:
        """Copy `flat` into rectangles. The hash is computed from the rectangles after they were written."""
        return self._write(self._iter_parts(named_rects, flat), hashing)

    def copy(self, named_rects: Sequence[NamedRect], source: ChunkPacker, hashing: bool) -> str:
        """Copy the same rectangles from `source`. Hash as `unpack` does."""
        return self._write(zip(self._iter_rows(named_rects), source._iter_rows(named_rects), strict=True), hashing)

    def _write(self, pairs: Iterable[tuple[ByteMatrix, ByteMatrix]], hashing: bool) -> str:
        digest = Hash() if hashing else None
        for rows, new in pairs:
            rows[...] = new
            self._update(digest, rows)
        return digest.hexdigest() if digest else ""

    def compare(self, named_rects: Iterable[NamedRect], base: np.ndarray, hashing: bool) -> Difference:
        """Compare rectangles with `base`, uint8 [bytes], and copy them into it. CPU only."""
        digest = Hash() if hashing else None
        positions, values, changed, offset = [np.empty(0, np.int64)], [np.empty(0, np.uint8)], 0, 0
        for rows, part in self._iter_parts(named_rects, base):
            self._update(digest, rows)
            differs = rows != part
            changed += (count := int(np.count_nonzero(differs)))
            if changed > len(base) * MAX_CHANGED_SHARE:
                part[...] = rows
            elif count:
                found = np.flatnonzero(differs)
                matrix, places = _index(rows, found)
                values.append(matrix[places])
                positions.append(found + offset)
                part.reshape(-1)[found] = values[-1]
            offset += rows.size
        dense = changed > len(base) * MAX_CHANGED_SHARE
        delta = None if dense else encode_delta(np.concatenate(positions), np.concatenate(values), len(base))
        return Difference(digest.hexdigest() if digest else "", changed, delta)

    def apply(self, named_rects: Iterable[NamedRect], delta: np.ndarray, nbytes: int, hashing: bool) -> str:
        """Write a delta into rectangles of `nbytes` bytes, and hash all of them as `unpack` does. Raise ValueError for an invalid delta."""
        digest = Hash() if hashing else None
        positions, values = decode_delta(delta, nbytes)
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
        """Return the hash of every chunk's rectangles as they are now. On the CPU it uses one core, because engines sample meanwhile."""
        digests = [Hash() for _ in chunks]
        for digest, named_rects in zip(digests, chunks, strict=True):  # launches all GPU work before waiting for the first
            for rows in self._iter_rows(named_rects):
                self._update(digest, rows)
        return [digest.hexdigest() for digest in digests]

    def _update(self, digest: Hash | None, rows: ByteMatrix) -> None:
        if digest is None:
            return
        if isinstance(rows, np.ndarray):
            start = time.perf_counter()
            digest.update(rows)
            self._seconds += time.perf_counter() - start
        else:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            digest.update(rows)
            events[1].record()
            self._events.append(events)

    def _iter_parts(self, named_rects: Iterable[NamedRect], flat: ByteMatrix) -> Iterator[tuple[ByteMatrix, ByteMatrix]]:
        """Yield `_iter_rows`, each with its place in `flat`. Raise ValueError if the rectangles do not have `len(flat)` bytes."""
        offset = 0
        for rows in self._iter_rows(named_rects):
            end = offset + rows.shape[0] * rows.shape[1]
            yield rows, flat[offset:end].reshape(rows.shape)
            offset = end
        if offset != len(flat):
            raise ValueError(f"a chunk's rectangles are {offset} bytes here, {len(flat)} on the other side")

    def _iter_rows(self, named_rects: Iterable[NamedRect]) -> Iterator[ByteMatrix]:
        """Yield the rectangles in batches of rows that fit a core's cache; on a GPU as a whole."""
        for named_rect in named_rects:
            matrix = self.view_named_rect(named_rect)
            rows, row_bytes = matrix.shape
            step = max(_HASH_BYTES // row_bytes, 1) if isinstance(matrix, np.ndarray) else rows
            for row in range(0, rows, step):
                yield matrix[row : row + step]


def _index(rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return a view of a matrix, and an index of its elements at these row-major positions. A contiguous matrix needs no division."""
    return (rows.reshape(-1), positions) if rows.flags.c_contiguous else (rows, np.divmod(positions, rows.shape[1]))


def make_source_packer(named_tensors: Mapping[str, torch.Tensor], chunks: Sequence[Chunk], rank: int) -> ChunkPacker:
    """Return a packer of the tensors that trainer rank `rank` needs for its chunks."""
    return ChunkPacker(named_tensors, {name for chunk in chunks if chunk.source == rank for name, _ in chunk.sources})


def make_target_packer(tensors: Mapping[str, torch.Tensor], chunks: Sequence[Chunk]) -> ChunkPacker:
    """Return a packer of the tensors that an engine rank needs for its chunks."""
    return ChunkPacker(tensors, {name for chunk in chunks for name, _ in chunk.targets})


def check_targets(packer: ChunkPacker, chunks: Sequence[Chunk]) -> None:
    """Raise ValueError, naming the tensor, if chunks do not fit an engine rank's tensors."""
    for chunk in chunks:
        nbytes = 0
        for name, rect in chunk.targets:
            rows, row_bytes = packer.view_named_rect((name, rect)).shape
            if min(rect) < 0 or rows != rect.rows:
                raise ValueError(f"{name}: rows {rect.row}..{rect.row + rect.rows - 1} lie outside")
            nbytes += rows * row_bytes
        if nbytes != chunk.nbytes:
            raise ValueError(f"{chunk.targets[0][0]} and its neighbors are {nbytes} bytes in the engine, {chunk.nbytes} are coming")
