"""Chunks: what one trainer rank sends to one engine rank in one go, a bounded number of bytes.

A plan's buckets are runs of whole rows of engine tensors; the share of a bucket that one trainer rank holds is a chunk. Its
rectangles lie one after the other, each in row order, without gaps: `pack` writes them so, `unpack` reads them so. Both sides go
through their chunks in the order of one list, so each knows which is next and nobody waits for somebody who waits for him.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel.buckets import Bucket, part_of
from parallel.geometry import Rect
from parallel.plan import Move
from parallel.regions import Place, byte_region


@dataclass(frozen=True)
class Chunk:
    """`sources` are rectangles of trainer rank `source`'s planes, `targets` those of engine rank `target`'s tensors that they fill.

    `offset` counts the bytes of the chunks that the same trainer rank sends before this one.
    """

    source: int
    target: int
    offset: int
    nbytes: int
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]

    def to_json(self) -> list[Any]:
        """What the engine rank must know of it."""
        return [self.source, self.offset, self.nbytes, [[name, rect.row, rect.col, rect.rows, rect.cols] for name, rect in self.targets]]

    @classmethod
    def from_json(cls, target: int, told: list[Any]) -> Chunk:
        source, offset, nbytes, places = told
        return cls(source, target, offset, nbytes, (), tuple((name, Rect(*rect)) for name, *rect in places))


def chunks_of(moves: Sequence[Move], buckets: Sequence[Bucket]) -> list[Chunk]:
    """All chunks of a plan. The engine ranks take turns, so that they are filled side by side."""
    into: dict[tuple[int, str], list[Move]] = defaultdict(list)
    for move in moves:
        into[move.target_rank, move.target].append(move)
    turns: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, int, int], list[tuple[int, Place, Place]]] = defaultdict(list)
    for bucket in buckets:
        for piece in bucket:
            rank, name = piece.plane.rank, piece.plane.name
            for move in into[rank, name]:
                part = part_of(move, piece)
                if part is not None:
                    from_rect, to_rect = part
                    within = Rect(piece.row + to_rect.row, to_rect.col, to_rect.rows, to_rect.cols)
                    size = within.rows * within.cols * piece.plane.itemsize
                    found[turns[rank], rank, move.source_rank].append((size, (move.source, from_rect), (name, within)))
        for rank in {piece.plane.rank for piece in bucket}:
            turns[rank] += 1
    sent: dict[int, int] = defaultdict(int)
    chunks = []
    for (_, target, source), parts in sorted(found.items()):
        nbytes = sum(size for size, _, _ in parts)
        chunks.append(Chunk(source, target, sent[source], nbytes, tuple(part[1] for part in parts), tuple(part[2] for part in parts)))
        sent[source] += nbytes
    return chunks


def pack(planes: Mapping[str, torch.Tensor], chunk: Chunk, flat: torch.Tensor) -> None:
    """Copies the trainer's rectangles of a chunk into `flat`, uint8 [chunk.nbytes]."""
    at = 0
    for name, rect in chunk.sources:
        view = byte_region(planes[name], rect)
        flat[at : at + view.numel()].view(view.shape).copy_(view)
        at += view.numel()
    if at != chunk.nbytes:
        raise AssertionError(f"{chunk.sources[0][0]} and its neighbours are {at} bytes here, the engine's tensors {chunk.nbytes}")


def unpack(flat: torch.Tensor, chunk: Chunk, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies `flat`, uint8 [chunk.nbytes], to where its rectangles belong in the engine's tensors."""
    at = 0
    for name, rect in chunk.targets:
        view = byte_region(tensors[name], rect)
        view.copy_(flat[at : at + view.numel()].view(view.shape))
        at += view.numel()


def check_places(chunks: Sequence[Chunk], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError where a chunk does not fit the engine's tensors: name, place, or number of bytes. Nothing is touched."""
    for chunk in chunks:
        total = 0
        for name, rect in chunk.targets:
            if name not in tensors:
                raise ValueError(f"the engine holds no parameter {name}")
            try:
                total += byte_region(tensors[name], rect).numel()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if total != chunk.nbytes:
            raise ValueError(f"{chunk.targets[0][0]} and its neighbours are {total} bytes in the engine, {chunk.nbytes} are coming")
