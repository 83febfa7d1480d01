"""Cuts what an engine must be given into buckets of bounded size, each a run of whole rows of some planes laid end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.formats import SCHEMES
from parallel.shards import Rect, Shard
from parallel.reshard import Move, kind_of, scale_name


@dataclass(frozen=True)
class Plane:
    """A named two-dimensional tensor of raw values on one rank."""

    rank: int
    name: str
    rows: int
    cols: int
    itemsize: int
    """Bytes per element."""


@dataclass(frozen=True)
class Slice:
    """Rows [row, row + rows) of a plane, lying at byte `offset` of a bucket."""

    plane: Plane
    row: int
    rows: int
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.plane.cols * self.plane.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


Bucket = tuple[Slice, ...]


def planes_of(
    shards: Mapping[int, Sequence[Shard]], fp8_roles: frozenset[str], high_itemsize: int, int8_roles: frozenset[str] = frozenset()
) -> list[Plane]:
    """Every plane of every rank, without padding rows; a quantised shard has two planes, its bytes and its FP32 scales.

    The stacked matrices of experts are one plane, one below the other, as in `Shard`.
    """
    found = []
    for rank, held in shards.items():
        for shard in held:
            kind = kind_of(shard.role, fp8_roles, int8_roles)
            itemsize = {"fp8": 1, "int8": 1, "fp32": 4, "high": high_itemsize}[kind]
            found.append(Plane(rank, shard.name, shard.filled_rows, shard.cols, itemsize))
            if kind in SCHEMES:
                found.append(Plane(rank, scale_name(shard.name, kind), *SCHEMES[kind].grid(shard.rows, shard.cols), 4))
    return found


def buckets(planes: Sequence[Plane], limit: int) -> list[Bucket]:
    """Fills buckets of at most `limit` bytes in order. Raises ValueError where a single row is larger than that."""
    filled: list[Bucket] = []
    current: list[Slice] = []
    used = 0
    for plane in planes:
        row_bytes = plane.cols * plane.itemsize
        if row_bytes > limit:
            raise ValueError(f"one row of {plane.name} is {row_bytes} bytes, a bucket holds {limit}")
        row = 0
        while row < plane.rows:
            rows = min((limit - used) // row_bytes, plane.rows - row)
            if rows == 0:
                filled.append(tuple(current))
                current, used = [], 0
                continue
            current.append(Slice(plane, row, rows, used))
            row, used = row + rows, used + rows * row_bytes
    if current:
        filled.append(tuple(current))
    return filled


def part_of(move: Move, piece: Slice) -> tuple[Rect, Rect] | None:
    """(source rectangle, rectangle within the slice) of the part of a move that falls into a slice; None where none does."""
    target = move.target_rect
    first = max(target.row, piece.row)
    last = min(target.row + target.rows, piece.row + piece.rows)
    if first >= last:
        return None
    source = Rect(move.source_rect.row + first - target.row, move.source_rect.col, last - first, target.cols)
    return source, Rect(first - piece.row, target.col, last - first, target.cols)
