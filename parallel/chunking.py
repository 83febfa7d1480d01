"""Chunks: the messages of a sync, each from one trainer rank to one engine rank and of bounded size. No torch. The rows of all engine
tensors, in order, fill one buffer of bounded size after the other. A chunk is one trainer rank's share of one buffer of one engine rank.
Its rectangles are packed one after the other, in row order and without gaps (`transport.pack`). Both sides handle their chunks in the order
of the same list, so no two ranks wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel.reshard import Transfer, no_garbage_collection
from parallel.shards import GeometryError, NamedRect, Rect

CHUNKS_IN_FLIGHT = 2  # chunks that a rank holds at a time during a sync: one is filled while the other is read

_Pair = tuple[int, NamedRect, NamedRect]  # bytes, source rectangle and target rectangle of one part of a chunk


@dataclass(frozen=True)
class Chunk:
    """Rectangles of a trainer rank's tensors, which fill rectangles of an engine rank's. `offset`: bytes that the trainer rank sends
    before."""

    source: int
    target: int
    offset: int
    nbytes: int
    sources: tuple[NamedRect, ...]
    targets: tuple[NamedRect, ...]

    def to_json(self) -> list[Any]:
        """Return the fields that the engine rank needs."""
        return [self.source, self.offset, self.nbytes, [[name, *rect] for name, rect in self.targets]]

    @classmethod
    def from_json(cls, target: int, fields: list[Any]) -> Chunk:
        source, offset, nbytes, named_rects = fields
        return cls(source, target, offset, nbytes, (), tuple((name, Rect(*rect)) for name, *rect in named_rects))


@no_garbage_collection()
def make_chunks(transfers: Sequence[Transfer], limit: int, source: int | None = None) -> list[Chunk]:
    """Cut transfers into chunks. The chunks that share a buffer consist of whole rows and take at most `limit` bytes together. The
    transfers must fill their target tensors without gaps, and be grouped by target rank. In the result engine ranks alternate. With
    `source`, return only that trainer rank's chunks. Raises GeometryError if a row exceeds `limit`."""
    by_tensor: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_tensor[transfer.target_rank, transfer.target].append(transfer)
    buffer, free = 0, limit
    first_buffer: dict[int, int] = {}
    pairs: dict[tuple[int, int, int], list[_Pair]] = defaultdict(list)
    previous_rank = -1
    for (rank, name), tensor_transfers in by_tensor.items():
        if rank != previous_rank:
            buffer, free, previous_rank = buffer + 1, limit, rank  # so that engines of one layout get the same chunks
        itemsize = tensor_transfers[0].format.element_bytes
        row_bytes = itemsize * max(transfer.target_rect.col + transfer.target_rect.cols for transfer in tensor_transfers)
        if row_bytes > limit:
            raise GeometryError("sync.bucket_mb", None, f"one row of {name} is {row_bytes} bytes, a chunk holds {limit}", "raise it")
        row, end_row = 0, max(transfer.target_rect.row + transfer.target_rect.rows for transfer in tensor_transfers)
        while row < end_row:
            if free < row_bytes:
                buffer, free = buffer + 1, limit
            rows = min(free // row_bytes, end_row - row)
            turn = buffer - first_buffer.setdefault(rank, buffer)
            for transfer in tensor_transfers:
                if source is not None and transfer.source_rank != source:
                    continue
                if rects := clip_transfer(transfer, row, row + rows):
                    source_rect, target_rect = rects
                    nbytes = target_rect.rows * target_rect.cols * itemsize
                    pairs[turn, rank, transfer.source_rank].append((nbytes, (transfer.source, source_rect), (name, target_rect)))
            row, free = row + rows, free - rows * row_bytes
    joined = []  # one chunk of all pairs with the same (turn, engine rank, trainer rank), in this order
    for (_, target, source_rank), chunk_pairs in sorted(pairs.items()):
        sizes, sources, targets = zip(*chunk_pairs, strict=True)
        joined.append(Chunk(source_rank, target, 0, sum(sizes), sources, targets))
    return resize(joined, [chunk.nbytes for chunk in joined])


def resize(chunks: Sequence[Chunk], sizes: Sequence[int]) -> list[Chunk]:
    """Return the chunks of all ranks with these sizes and the offsets that follow from them."""
    sent: dict[int, int] = defaultdict(int)
    resized = []
    for chunk, nbytes in zip(chunks, sizes, strict=True):
        resized.append(replace(chunk, offset=sent[chunk.source], nbytes=nbytes))
        sent[chunk.source] += nbytes
    return resized


def clip_transfer(transfer: Transfer, start_row: int, end_row: int) -> tuple[Rect, Rect] | None:
    """Return the source and target rectangle of a transfer's part in target rows [start_row, end_row), or None if there is no such part."""
    source, target = transfer.source_rect, transfer.target_rect
    first, last = max(target.row, start_row), min(target.row + target.rows, end_row)
    if last - first == target.rows:  # fast path for nearly all of a large plan's millions of transfers
        return source, target
    if first >= last:
        return None
    return Rect(source.row + first - target.row, source.col, last - first, target.cols), target._replace(row=first, rows=last - first)
