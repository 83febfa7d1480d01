"""The vocabulary of the geometry: a tensor of the checkpoint, a rectangle of it, and a shard made of such rectangles.

All positions are in the coordinates of the Hugging Face tensor: a shard is a list of regions, each a rectangle of one HF tensor that
lies at some row and column of the shard. Trainer shards, engine shards and the checkpoint itself are all such lists, so import, export
and sync are one operation: intersect two lists (see `parallel.reshard`). One-dimensional tensors count as N x 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parallel.formats import TensorFormat
from parallel.plug import InputError

FP32_ROLES = frozenset({"router_bias", "kv_scales"})
"""Roles that are FP32 everywhere, in checkpoint, trainer and engine: a rounded correction bias would change the routing."""


class GeometryError(InputError):
    """A model that cannot be sharded as asked."""


class Rect(NamedTuple):
    """Rows [row, row + rows) and columns [col, col + cols) of a tensor, in elements."""

    row: int
    col: int
    rows: int
    cols: int


NamedRect = tuple[str, Rect]
"""A rectangle of a named tensor."""


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the checkpoint.

    `role` decides its precision: attention_qkv, attention_output, mlp_in, mlp_out, norm, bias, router, router_bias, embedding or
    lm_head, value_head, kv_scales, lora. Experts have the roles mlp_in and mlp_out like any other MLP.
    """

    name: str
    rows: int
    cols: int
    role: str
    vector: bool = False
    """One-dimensional in the checkpoint and in every shard."""


class Region(NamedTuple):
    """The rectangle `tensor_rect` of tensor `tensor`; its first element lies at (`shard_row`, `shard_col`) of a shard."""

    tensor: HFTensor
    tensor_rect: Rect
    shard_row: int = 0
    shard_col: int = 0

    @property
    def shard_rect(self) -> Rect:
        """The rectangle of the shard that holds the region."""
        return Rect(self.shard_row, self.shard_col, self.tensor_rect.rows, self.tensor_rect.cols)


@dataclass(frozen=True)
class Shard:
    """One parameter as one rank holds it. Example: q, k and v stacked in `qkv_proj.weight`, three regions."""

    name: str
    rows: int
    cols: int
    regions: tuple[Region, ...]
    experts: int = 0
    """Above 0 the live tensor is [experts, rows / experts, cols]; here its experts' matrices lie one below the other."""

    @property
    def role(self) -> str:
        return self.regions[0].tensor.role

    @property
    def vector(self) -> bool:
        return self.regions[0].tensor.vector

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the live tensor."""
        if self.vector:
            return (self.rows,)
        return (self.experts, self.rows // self.experts, self.cols) if self.experts else (self.rows, self.cols)

    def scale_shape(self, format: TensorFormat) -> tuple[int, ...]:
        """Return the shape of the live scales in a quantised format; () in another."""
        return (*self.shape[:-2], *format.scale_grid(self.shape[-2], self.cols)) if format.quantized else ()


def take_all(tensor: HFTensor) -> Region:
    """Return the region that is a whole tensor."""
    return Region(tensor, Rect(0, 0, tensor.rows, tensor.cols))


def take_rows(tensor: HFTensor, row: int, rows: int) -> Region:
    """Return rows [row, row + rows) of a tensor."""
    return Region(tensor, Rect(row, 0, rows, tensor.cols))


def stack_regions(name: str, regions: list[Region], experts: int = 0) -> Shard:
    """Return a shard of regions with equal columns, one below the other; neighbours that continue each other become one region."""
    stacked: list[Region] = []
    row = 0
    for tensor, rect, *_ in regions:
        last = stacked[-1] if stacked else None
        if last and last.tensor is tensor and last.tensor_rect.col == rect.col and last.tensor_rect.row + last.tensor_rect.rows == rect.row:
            stacked[-1] = Region(tensor, last.tensor_rect._replace(rows=last.tensor_rect.rows + rect.rows), last.shard_row, 0)
        else:
            stacked.append(Region(tensor, rect, row, 0))
        row += rect.rows
    return Shard(name, row, regions[0].tensor_rect.cols, tuple(stacked), experts)


def split_rows(whole: Region, part: int, parts: int, field: str) -> Region:
    """Return the `part`-th of `parts` equal ranges of rows. Raise GeometryError, naming `field`, when `parts` does not divide them."""
    tensor, (row, col, rows, cols), _, _ = whole
    size = _divide(tensor, "rows", rows, parts, field)
    return Region(tensor, Rect(row + part * size, col, size, cols))


def split_cols(whole: Region, part: int, parts: int, field: str) -> Region:
    """Return the `part`-th of `parts` equal ranges of columns. Raise GeometryError, naming `field`, when `parts` does not divide them."""
    tensor, (row, col, rows, cols), _, _ = whole
    size = _divide(tensor, "columns", cols, parts, field)
    return Region(tensor, Rect(row, col + part * size, rows, size))


def _divide(tensor: HFTensor, what: str, length: int, parts: int, field: str) -> int:
    if length % parts:
        raise GeometryError(field, parts, f"must divide the {length} {what} of {tensor.name}", "choose a smaller tensor-parallel size")
    return length // parts


def find_misaligned_region(shard: Shard, format: TensorFormat) -> Region | None:
    """Return the first region of a shard that cuts a block of its format, None where there is none.

    A region cuts no block when it begins on block edges of both its tensor and the shard, and ends on block edges or at the tensor's end.
    Where a scale belongs to a whole row, the row may be cut anywhere.
    """
    if format.block is None:
        return None
    height, width = format.block[0], format.block[1] or 1
    for region in shard.regions:
        tensor, (row, col, rows, cols) = region.tensor, region.tensor_rect
        if row % height or region.shard_row % height or col % width or region.shard_col % width:
            return region
        if (rows % height and row + rows != tensor.rows) or (cols % width and col + cols != tensor.cols):
            return region
    return None
