"""Copy and hash the rectangles of chunks: `ChunkPacker` packs them into flat buffers, unpacks them, and hashes them on the way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from parallel.chunking import Chunk
from parallel.digest import ByteMatrix, Hash, view_bytes
from parallel.shards import NamedRect

_TILE = 256 << 10
"""Bytes. On the machine this was measured on, hashing 256 KiB just before they are copied costs 5 % of the copy; later, 100 %."""


class Stopwatch:
    """Adds up the seconds of something that is done in pieces. On a GPU, which works on while Python goes on, by events."""

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
        """On a GPU, waits until the last piece is done."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3


class ChunkPacker:
    """Named tensors as byte matrices, made once per sync: what chunks are copied from, copied to, and hashed in."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        """Raises ValueError, by name, for a tensor that is missing or whose rows are no runs of bytes."""
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
        """Spent on hashing so far; on a GPU, waits until that is done."""
        return self._clock.seconds

    def view_named_rect(self, named_rect: NamedRect) -> ByteMatrix:
        """The bytes of a rectangle, a view."""
        name, rect = named_rect
        matrix, size = self._matrices[name]
        return matrix[rect.row : rect.row + rect.rows, rect.col * size : (rect.col + rect.cols) * size]

    def pack(self, named_rects: Iterable[NamedRect], flat: ByteMatrix, hashing: bool) -> str:
        """Copies rectangles into `flat`, uint8 [bytes], one after the other.

        Where `hashing`, returns `Hash` of the rectangles' bytes in that order, as 32 hex digits; else an empty text.
        """
        state, at = Hash() if hashing else None, 0
        for tile in self._iter_tiles(named_rects):
            rows, cols = tile.shape
            self._hash(state, tile)
            flat[at : at + rows * cols].reshape(rows, cols)[...] = tile
            at += rows * cols
        _check_filled(at, flat)
        return state.hexdigest() if state else ""

    def unpack(self, named_rects: Iterable[NamedRect], flat: ByteMatrix, hashing: bool) -> str:
        """The inverse of `pack`; hashes what the rectangles hold after they were written."""
        state, at = Hash() if hashing else None, 0
        for tile in self._iter_tiles(named_rects):
            rows, cols = tile.shape
            tile[...] = flat[at : at + rows * cols].reshape(rows, cols)
            at += rows * cols
            self._hash(state, tile)
        _check_filled(at, flat)
        return state.hexdigest() if state else ""

    def copy(self, named_rects: Sequence[NamedRect], other: ChunkPacker, hashing: bool) -> str:
        """Copies the same rectangles of `other` here; else as `unpack`."""
        state = Hash() if hashing else None
        for tile, theirs in zip(self._iter_tiles(named_rects), other._iter_tiles(named_rects), strict=True):
            tile[...] = theirs
            self._hash(state, tile)
        return state.hexdigest() if state else ""

    def _hash(self, state: Hash | None, tile: ByteMatrix) -> None:
        if state is not None:
            with self._clock.running(on_gpu=not isinstance(tile, np.ndarray)):
                state.update(tile)

    def _iter_tiles(self, named_rects: Iterable[NamedRect]) -> Iterator[ByteMatrix]:
        """The rectangles in runs of rows that are hashed while a core's cache still holds them; on a GPU, uncut."""
        for named_rect in named_rects:
            view = self.view_named_rect(named_rect)
            rows, cols = view.shape
            step = max(_TILE // cols, 1) if isinstance(view, np.ndarray) else rows
            for row in range(0, rows, step):
                yield view[row : row + step]


def _check_filled(at: int, flat: ByteMatrix) -> None:
    """The other side counted `len(flat)` bytes for the same rectangles."""
    if at != len(flat):
        raise ValueError(f"a chunk's rectangles are {at} bytes here, {len(flat)} on the other side")


def make_source_packer(named_tensors: Mapping[str, torch.Tensor], chunks: Sequence[Chunk], rank: int) -> ChunkPacker:
    """Trainer rank `rank`'s named_tensors, as far as its chunks need them."""
    return ChunkPacker(named_tensors, {name for chunk in chunks if chunk.source == rank for name, _ in chunk.sources})


def make_target_packer(tensors: Mapping[str, torch.Tensor], chunks: Sequence[Chunk]) -> ChunkPacker:
    """An engine rank's tensors, as far as its chunks need them."""
    return ChunkPacker(tensors, {name for chunk in chunks for name, _ in chunk.targets})


def check_targets(memory: ChunkPacker, chunks: Sequence[Chunk]) -> None:
    """Raises ValueError, by name, where chunks do not fit an engine rank's tensors. Nothing is touched."""
    for chunk in chunks:
        total = 0
        for name, rect in chunk.targets:
            if min(rect.row, rect.col, rect.rows, rect.cols) < 0 or memory.view_named_rect((name, rect)).shape[0] != rect.rows:
                raise ValueError(f"{name}: rows {rect.row}..{rect.row + rect.rows - 1} lie outside")
            total += memory.view_named_rect((name, rect)).shape[1] * rect.rows
        if total != chunk.nbytes:
            raise ValueError(f"{chunk.targets[0][0]} and its neighbours are {total} bytes in the engine, {chunk.nbytes} are coming")
