"""Buckets and chunks: what is sent in one go, a bounded number of bytes. No torch.

A bucket is a run of whole rows of some engine tensors laid end to end; the share of a bucket that one trainer rank holds is a chunk. Its
rectangles lie one after the other, each in row order, without gaps: `transport.pack` packs, unpacks and hashes them so. Both sides go
through their chunks in the order of one list, so each knows which is next and nobody waits for somebody who waits for him.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.formats import SCHEMES
from parallel.reshard import Transfer, kind_of, scale_name
from parallel.shards import NamedRect, Rect, Shard

CHUNKS_IN_FLIGHT = 2
"""Chunks of a sync that a rank holds at a time: one is filled while the other is read."""


@dataclass(frozen=True)
class TensorSpec:
    """A named two-dimensional tensor of raw values on one rank."""

    rank: int
    name: str
    rows: int
    cols: int
    itemsize: int
    """Bytes per element."""


@dataclass(frozen=True)
class RowRange:
    """Rows [row, row + rows) of a tensor, lying at byte `offset` of a bucket."""

    spec: TensorSpec
    row: int
    rows: int
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.spec.cols * self.spec.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


Bucket = tuple[RowRange, ...]


def list_tensor_specs(
    shards: Mapping[int, Sequence[Shard]], fp8_roles: frozenset[str], high_itemsize: int, int8_roles: frozenset[str] = frozenset()
) -> list[TensorSpec]:
    """Every spec of every rank, without padding rows; a quantised shard has two tensors, its bytes and its FP32 scales.

    The stacked matrices of experts are one tensor, one below the other, as in `Shard`.
    """
    found = []
    for rank, held in shards.items():
        for shard in held:
            kind = kind_of(shard.role, fp8_roles, int8_roles)
            itemsize = {"fp8": 1, "int8": 1, "fp32": 4, "high": high_itemsize}[kind]
            found.append(TensorSpec(rank, shard.name, shard.filled_rows, shard.cols, itemsize))
            if kind in SCHEMES:
                found.append(TensorSpec(rank, scale_name(shard.name, kind), *SCHEMES[kind].grid(shard.rows, shard.cols), 4))
    return found


def fill_buckets(specs: Sequence[TensorSpec], limit: int) -> list[Bucket]:
    """Fills buckets of at most `limit` bytes in order. Raises ValueError where a single row is larger than that."""
    filled: list[Bucket] = []
    current: list[RowRange] = []
    used = 0
    for spec in specs:
        row_bytes = spec.cols * spec.itemsize
        if row_bytes > limit:
            raise ValueError(f"one row of {spec.name} is {row_bytes} bytes, a bucket holds {limit}")
        row = 0
        while row < spec.rows:
            rows = min((limit - used) // row_bytes, spec.rows - row)
            if rows == 0:
                filled.append(tuple(current))
                current, used = [], 0
                continue
            current.append(RowRange(spec, row, rows, used))
            row, used = row + rows, used + rows * row_bytes
    if current:
        filled.append(tuple(current))
    return filled


def clip_transfer(transfer: Transfer, row_range: RowRange) -> tuple[Rect, Rect] | None:
    """(source rectangle, rectangle within the slice) of the part of a transfer that falls into a slice; None where none does."""
    target = transfer.target_rect
    first = max(target.row, row_range.row)
    last = min(target.row + target.rows, row_range.row + row_range.rows)
    if first >= last:
        return None
    source = Rect(transfer.source_rect.row + first - target.row, transfer.source_rect.col, last - first, target.cols)
    return source, Rect(first - row_range.row, target.col, last - first, target.cols)


@dataclass(frozen=True)
class Chunk:
    """`sources` are rectangles of trainer rank `source`'s specs, `targets` those of engine rank `target`'s tensors that they fill.

    `offset` counts the bytes of the chunks that the same trainer rank sends before this one.
    """

    source: int
    target: int
    offset: int
    nbytes: int
    sources: tuple[NamedRect, ...]
    targets: tuple[NamedRect, ...]

    def to_json(self) -> list[Any]:
        """What the engine rank must know of it."""
        return [self.source, self.offset, self.nbytes, [[name, rect.row, rect.col, rect.rows, rect.cols] for name, rect in self.targets]]

    @classmethod
    def from_json(cls, target: int, told: list[Any]) -> Chunk:
        source, offset, nbytes, named_rects = told
        return cls(source, target, offset, nbytes, (), tuple((name, Rect(*rect)) for name, *rect in named_rects))


def make_chunks(transfers: Sequence[Transfer], buckets: Sequence[Bucket]) -> list[Chunk]:
    """All chunks of a plan. The engine ranks take turns, so that they are filled side by side."""
    into: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        into[transfer.target_rank, transfer.target].append(transfer)
    turns: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, int, int], list[tuple[int, NamedRect, NamedRect]]] = defaultdict(list)
    for bucket in buckets:
        for row_range in bucket:
            rank, name = row_range.spec.rank, row_range.spec.name
            for transfer in into[rank, name]:
                part = clip_transfer(transfer, row_range)
                if part is not None:
                    from_rect, to_rect = part
                    within = Rect(row_range.row + to_rect.row, to_rect.col, to_rect.rows, to_rect.cols)
                    size = within.rows * within.cols * row_range.spec.itemsize
                    found[turns[rank], rank, transfer.source_rank].append((size, (transfer.source, from_rect), (name, within)))
        for rank in {row_range.spec.rank for row_range in bucket}:
            turns[rank] += 1
    sent: dict[int, int] = defaultdict(int)
    chunks = []
    for (_, target, source), parts in sorted(found.items()):
        nbytes = sum(size for size, _, _ in parts)
        chunks.append(Chunk(source, target, sent[source], nbytes, tuple(part[1] for part in parts), tuple(part[2] for part in parts)))
        sent[source] += nbytes
    return chunks
