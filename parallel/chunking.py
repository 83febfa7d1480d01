"""Chunks: what one trainer rank sends to one engine rank in one go, a bounded number of bytes. No torch.

The rows of all engine tensors, in order, fill one buffer of bounded size after the other; what one trainer rank contributes to one
buffer of one engine rank is a chunk. Its rectangles lie one after the other, each in row order, without gaps:
`transport.pack` packs, unpacks and hashes them so. Both sides go through their chunks in the order of one list, so each knows which
comes next and no two ranks wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel.reshard import Transfer, no_garbage_collection
from parallel.shards import GeometryError, NamedRect, Rect

CHUNKS_IN_FLIGHT = 2
"""Chunks of a sync that a rank holds at a time: one is filled while the other is read."""


@dataclass(frozen=True)
class Chunk:
    """`sources` are rectangles of trainer rank `source`'s tensors, `targets` those of engine rank `target`'s tensors that they fill.

    `offset` counts the bytes of the chunks that the same trainer rank sends before this one.
    """

    source: int
    target: int
    offset: int
    nbytes: int
    sources: tuple[NamedRect, ...]
    targets: tuple[NamedRect, ...]

    def to_json(self) -> list[Any]:
        """Return what the engine rank must know of it."""
        return [self.source, self.offset, self.nbytes, [[name, *rect] for name, rect in self.targets]]

    @classmethod
    def from_json(cls, target: int, fields: list[Any]) -> Chunk:
        source, offset, nbytes, named_rects = fields
        return cls(source, target, offset, nbytes, (), tuple((name, Rect(*rect)) for name, *rect in named_rects))


@no_garbage_collection()
def make_chunks(transfers: Sequence[Transfer], limit: int, source: int | None = None) -> list[Chunk]:
    """Cut transfers into chunks; whole rows of all chunks that share a buffer are at most `limit` bytes.

    The transfers must fill their target tensors without gaps and name the target ranks one after the other. Engine ranks alternate in
    the result, so that they are filled side by side. With `source`, returns the chunks of that trainer rank alone. Raises GeometryError
    where a single row is larger than `limit`.
    """
    by_tensor: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_tensor[transfer.target_rank, transfer.target].append(transfer)
    buffer, free = 0, limit
    first_buffer: dict[int, int] = {}
    pairs: dict[tuple[int, int, int], list[tuple[int, NamedRect, NamedRect]]] = defaultdict(list)
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
    return _join(pairs)


def resize(chunks: Sequence[Chunk], sizes: Sequence[int]) -> list[Chunk]:
    """Return all ranks' chunks with so many bytes each instead, as a delta of them is sent."""
    sent: dict[int, int] = defaultdict(int)
    resized = []
    for chunk, nbytes in zip(chunks, sizes, strict=True):
        resized.append(replace(chunk, offset=sent[chunk.source], nbytes=nbytes))
        sent[chunk.source] += nbytes
    return resized


def _join(pairs: dict[tuple[int, int, int], list[tuple[int, NamedRect, NamedRect]]]) -> list[Chunk]:
    """Make a chunk of all pairs of rectangles with the same (turn of the engine rank, engine rank, trainer rank), in this order."""
    sent: dict[int, int] = defaultdict(int)
    chunks = []
    for (_, target, source), chunk_pairs in sorted(pairs.items()):
        sizes, sources, targets = zip(*chunk_pairs, strict=True)
        chunks.append(Chunk(source, target, sent[source], sum(sizes), sources, targets))
        sent[source] += sum(sizes)
    return chunks


def clip_transfer(transfer: Transfer, start_row: int, end_row: int) -> tuple[Rect, Rect] | None:
    """Return (source rectangle, target rectangle) of a transfer's part in rows [start_row, end_row) of its target, None without one."""
    source, target = transfer.source_rect, transfer.target_rect
    first, last = max(target.row, start_row), min(target.row + target.rows, end_row)
    if last - first == target.rows:  # of the millions of a large plan, nearly all
        return source, target
    if first >= last:
        return None
    return Rect(source.row + first - target.row, source.col, last - first, target.cols), target._replace(row=first, rows=last - first)
