"""The words of the geometry: a tensor of the checkpoint, a rectangle of it, and a shard put together from such rectangles.

All places are told in the coordinates of the Hugging Face tensor: a shard is a list of pieces, each a rectangle of one HF tensor
laid at some row and column of the shard. Trainer shards, engine shards and the checkpoint itself are all such lists, so import,
export and sync are one operation: intersect two lists (see `parallel.reshard`). One-dimensional tensors count as N x 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parallel.formats import BLOCK, SCHEMES

FP32_ROLES = frozenset({"router_bias"})
"""Roles that are FP32 everywhere, in checkpoint, trainer and engine: a rounded correction bias would route tokens otherwise."""


class GeometryError(ValueError):
    """A model or a layout that cannot be cut as asked. `field`, `value`, `rule`, `fix` as in a user's error line."""

    def __init__(self, field: str, value: object, rule: str, fix: str = "") -> None:
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        super().__init__(f"{field} = {value}: {rule}" + (f"; {fix}" if fix else ""))


class Rect(NamedTuple):
    """Rows [row, row + rows) and columns [col, col + cols) of a tensor, in elements."""

    row: int
    col: int
    rows: int
    cols: int


Place = tuple[str, Rect]
"""A rectangle of a named tensor."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint.

    `role` decides its precision: attention_qkv, attention_output, mlp_in, mlp_out, norm, bias, router, router_bias, embedding or
    lm_head. Experts have the roles mlp_in and mlp_out like any other MLP.
    """

    name: str
    rows: int
    cols: int
    role: str
    vector: bool = False
    """One-dimensional in the checkpoint and in every shard."""


class Piece(NamedTuple):
    """The rectangle `source` of tensor `tensor`, laid with its first element at (`row`, `col`) of a shard."""

    tensor: Tensor
    source: Rect
    row: int = 0
    col: int = 0


@dataclass(frozen=True)
class Shard:
    """One parameter as one rank holds it. Example: q, k and v stacked in `qkv_proj.weight`, three pieces."""

    name: str
    rows: int
    cols: int
    pieces: tuple[Piece, ...]
    experts: int = 0
    """Above 0 the live tensor is [experts, rows / experts, cols]; here it is told as its experts' matrices one below the other."""

    @property
    def filled_rows(self) -> int:
        """Rows that hold pieces; what lies below is padding."""
        return max(piece.row + piece.source.rows for piece in self.pieces)

    @property
    def role(self) -> str:
        return self.pieces[0].tensor.role

    @property
    def vector(self) -> bool:
        return self.pieces[0].tensor.vector

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the live tensor."""
        if self.vector:
            return (self.rows,)
        return (self.experts, self.rows // self.experts, self.cols) if self.experts else (self.rows, self.cols)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the live FP32 scales where the shard is FP8: one for each 128x128 block."""
        return self.scale_shape_of("fp8")

    def scale_shape_of(self, kind: str) -> tuple[int, ...]:
        """Shape of the live FP32 scales where the shard is quantised as `kind`, one of `SCHEMES`."""
        return (*self.shape[:-2], *SCHEMES[kind].grid(self.shape[-2], self.cols))


def whole(tensor: Tensor) -> Piece:
    """The piece that is all of a tensor."""
    return Piece(tensor, Rect(0, 0, tensor.rows, tensor.cols))


def rows_at(tensor: Tensor, row: int, rows: int) -> Piece:
    """Rows [row, row + rows) of a tensor."""
    return Piece(tensor, Rect(row, 0, rows, tensor.cols))


def stack(name: str, pieces: list[Piece], experts: int = 0) -> Shard:
    """A shard of pieces with equal columns, one below the other; neighbours that continue each other become one piece."""
    laid: list[Piece] = []
    row = 0
    for tensor, source, *_ in pieces:
        last = laid[-1] if laid else None
        if last and last.tensor is tensor and last.source.col == source.col and last.source.row + last.source.rows == source.row:
            joined = last.source._replace(rows=last.source.rows + source.rows)
            laid[-1] = Piece(tensor, joined, last.row, 0)
        else:
            laid.append(Piece(tensor, source, row, 0))
        row += source.rows
    return Shard(name, row, pieces[0].source.cols, tuple(laid), experts)


def rows_of(tensor: Tensor, part: int, parts: int, field: str = "layout.tp") -> Piece:
    """The `part`-th of `parts` equal runs of rows. Raises GeometryError, naming `field`, when they do not divide."""
    size = _divide(tensor, "rows", tensor.rows, parts, field)
    return rows_at(tensor, part * size, size)


def cols_of(tensor: Tensor, part: int, parts: int, field: str = "layout.tp") -> Piece:
    """The `part`-th of `parts` equal runs of columns. Raises GeometryError, naming `field`, when they do not divide."""
    size = _divide(tensor, "columns", tensor.cols, parts, field)
    return Piece(tensor, Rect(0, part * size, tensor.rows, size))


def _divide(tensor: Tensor, what: str, length: int, parts: int, field: str) -> int:
    if length % parts:
        raise GeometryError(field, parts, f"must divide the {length} {what} of {tensor.name}", "choose a smaller tensor-parallel size")
    return length // parts


def vocabulary_rows(name: str, tensor: Tensor, padded: int, part: int, parts: int) -> Shard:
    """The `part`-th of `parts` equal runs of an embedding of `padded` rows; the padding at its end is no piece."""
    size = padded // parts
    first = min(part * size, tensor.rows)
    return Shard(name, size, tensor.cols, (rows_at(tensor, first, min(first + size, tensor.rows) - first),))


def cut_piece(shard: Shard) -> Piece | None:
    """The first piece of a shard that cuts a 128x128 block, None where all are whole.

    A piece is whole when it begins on block edges of both its tensor and the shard, and ends on block edges or at the tensor's end.
    """
    for piece in shard.pieces:
        tensor, (row, col, rows, cols) = piece.tensor, piece.source
        if (row | col | piece.row | piece.col) % BLOCK:
            return piece
        if (rows % BLOCK and row + rows != tensor.rows) or (cols % BLOCK and col + cols != tensor.cols):
            return piece
    return None
