"""Chunks: the messages of a sync, each from one trainer rank to one engine rank and of bounded size. No torch. The rows of all engine
tensors, in order, fill one buffer of bounded size after the other. A chunk is one trainer rank's share of one buffer of one engine rank.
Its rectangles are packed one after the other, in row order and without gaps (`transport.pack`). Both sides handle their chunks in the order
of the same list, so no two ranks wait for each other."""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from parallel.reshard import Transfer
from parallel.shards import GeometryError, NamedRect, Rect, no_garbage_collection

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
    buffer: int = field(default=0, compare=False)  # of the engine rank, whose chunks are in the order of (buffer, source)

    def to_json(self) -> list[Any]:
        """Return the fields that the engine rank needs."""
        return [self.source, self.offset, self.nbytes, [[name, *rect] for name, rect in self.targets]]

    @classmethod
    def from_json(cls, target: int, fields: list[Any]) -> Chunk:
        source, offset, nbytes, named_rects = fields
        return cls(source, target, offset, nbytes, (), tuple((name, Rect(*rect)) for name, *rect in named_rects))


def encode_chunks(chunks: Iterable[Chunk]) -> str:
    """Return an engine rank's chunks as text: compressed JSON, because names repeat."""
    return base64.b64encode(zlib.compress(json.dumps([chunk.to_json() for chunk in chunks]).encode(), 1)).decode()


def decode_chunks(target: int, text: str) -> list[Chunk]:
    """Return the chunks of `encode_chunks`, for engine rank `target`."""
    return [Chunk.from_json(target, fields) for fields in json.loads(zlib.decompress(base64.b64decode(text)))]


class Extent(NamedTuple):
    """The part of an engine tensor that a sync fills, from its first row and column."""

    name: str
    itemsize: int
    rows: int
    row_bytes: int

    @classmethod
    def around(cls, name: str, itemsize: int, rects: Sequence[Rect]) -> Extent:
        """Return the extent that ends with the last row and column of `rects`."""
        return cls(name, itemsize, max(rect.row + rect.rows for rect in rects), itemsize * max(rect.col + rect.cols for rect in rects))


Cuts = Mapping[str, Sequence[tuple[int, int, int]]]
"""Engine tensor -> (number of the buffer, first row, end) of its rows in each buffer."""


def cut_extents(extents: Iterable[Extent], limit: int) -> Cuts:
    """Return where the tensors of one engine rank, in order, are cut into buffers of at most `limit` bytes. Tensors without a name take
    space, but are left out. Raise GeometryError if a row exceeds `limit`."""
    buffer, free = 0, limit
    cuts: dict[str, list[tuple[int, int, int]]] = {}
    for name, _, end_row, row_bytes in extents:
        if row_bytes > limit:
            raise GeometryError("sync.bucket_mb", None, f"one row of {name} is {row_bytes} bytes, a chunk holds {limit}", "raise it")
        row, own = 0, cuts.setdefault(name, []) if name else []
        while row < end_row:
            if free < row_bytes:
                buffer, free = buffer + 1, limit
            rows = min(free // row_bytes, end_row - row)
            own.append((buffer, row, row + rows))
            row, free = row + rows, free - rows * row_bytes
    return cuts


@no_garbage_collection()
def make_chunks(transfers: Sequence[Transfer], limit: int) -> list[Chunk]:
    """Cut transfers into chunks. The chunks that share a buffer consist of whole rows and take at most `limit` bytes together. The
    transfers must fill their target tensors without gaps, and be grouped by target rank. In the result engine ranks alternate. Raises
    GeometryError if a row exceeds `limit`."""
    by_tensor: dict[int, dict[str, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    for transfer in transfers:
        by_tensor[transfer.target_rank][transfer.target].append(transfer)
    cuts = {
        rank: cut_extents(
            (
                Extent.around(name, parts[0].format.element_bytes, [transfer.target_rect for transfer in parts])
                for name, parts in tensors.items()
            ),
            limit,
        )
        for rank, tensors in by_tensor.items()
    }
    return join_chunks(transfers, cuts.__getitem__)


@no_garbage_collection()
def join_chunks(transfers: Iterable[Transfer], cuts_of: Callable[[int], Cuts]) -> list[Chunk]:
    """Return one chunk of all that a trainer rank sends into one buffer of an engine rank, ordered by buffer, engine rank, trainer rank.
    `cuts_of` returns the cuts of an engine rank's tensors. Transfers of one tensor must follow each other if they share a buffer."""
    pairs: dict[tuple[int, int, int], list[_Pair]] = defaultdict(list)
    for tensor in _group_by_target(transfers):
        cuts = cuts_of(tensor[0].target_rank)[tensor[0].target]
        ends = [end for *_, end in cuts]
        for transfer in tensor:
            rect = transfer.target_rect
            for buffer, row, end in cuts[bisect_right(ends, rect.row) : bisect_left(ends, rect.row + rect.rows) + 1]:
                source_rect, target_rect = clip_transfer(transfer, row, end)
                nbytes = target_rect.rows * target_rect.cols * transfer.format.element_bytes
                named = (transfer.source, source_rect), (transfer.target, target_rect)
                pairs[buffer, transfer.target_rank, transfer.source_rank].append((nbytes, *named))
    joined = []
    for (buffer, target, source_rank), chunk_pairs in sorted(pairs.items()):
        sizes, sources, targets = zip(*chunk_pairs, strict=True)
        joined.append(Chunk(source_rank, target, 0, sum(sizes), sources, targets, buffer))
    return resize(joined, [chunk.nbytes for chunk in joined])


def _group_by_target(transfers: Iterable[Transfer]) -> Iterable[list[Transfer]]:
    """Return the transfers into each engine tensor. Values and scales of a tensor may alternate."""
    groups: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[transfer.target_rank, transfer.target].append(transfer)
    return groups.values()


def resize(chunks: Sequence[Chunk], sizes: Sequence[int]) -> list[Chunk]:
    """Return the chunks of all ranks with these sizes and the offsets that follow from them."""
    sent: dict[int, int] = defaultdict(int)
    resized = []
    for chunk, nbytes in zip(chunks, sizes, strict=True):
        resized.append(replace(chunk, offset=sent[chunk.source], nbytes=nbytes))
        sent[chunk.source] += nbytes
    return resized


def clip_transfer(transfer: Transfer, start_row: int, end_row: int) -> tuple[Rect, Rect]:
    """Return the source and target rectangle of a transfer's part in target rows [start_row, end_row), of which it has some."""
    source, target = transfer.source_rect, transfer.target_rect
    first, last = max(target.row, start_row), min(target.row + target.rows, end_row)
    if last - first == target.rows:  # fast path for nearly all of a large plan's millions of transfers
        return source, target
    return Rect(source.row + first - target.row, source.col, last - first, target.cols), target._replace(row=first, rows=last - first)
