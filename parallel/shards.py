"""Vocabulary of the geometry: checkpoint tensors, rectangles of them, shards made of rectangles, and weights that ranks shard. All
positions are in the coordinates of the Hugging Face tensor. A shard is a list of regions: a region is a rectangle of one HF tensor and its
position in the shard. Trainer shards, engine shards and the checkpoint itself are all such lists, so import, export and sync are the same
operation: intersect two lists (see `parallel.reshard`). One-dimensional tensors count as N x 1."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from parallel.formats import TensorFormat
from parallel.plug import InputError

FP32_ROLES = frozenset({"router_bias", "kv_scales", "delta_decay"})
"""Roles stored as FP32 in trainer, engine and exports. A rounded correction bias would change the routing, a rounded decay every state."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn off Python's cycle collector, which would scan again and again what large plans and imports make, although all of it stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GeometryError(InputError):
    """Raised for a model that cannot be sharded as requested."""


class Rect(NamedTuple):
    """Rows [row, row + rows) and columns [col, col + cols) of a tensor, in elements."""

    row: int
    col: int
    rows: int
    cols: int


NamedRect = tuple[str, Rect]  # a rectangle of a named tensor


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the checkpoint. `role` decides its precision: attention_qkv, attention_output, mlp_in, mlp_out (experts included), norm,
    bias, router, router_bias, shared_gate, delta_gates, delta_conv, delta_decay, indexer_gate, embedding, lm_head, value_head, kv_scales,
    lora or mtp_projection."""

    name: str
    rows: int
    cols: int
    role: str
    vector: bool = False  # one-dimensional in the checkpoint and in every shard

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint. A convolution's channels have one input each."""
        if self.vector:
            return (self.rows,)
        return (self.rows, 1, self.cols) if self.role == "delta_conv" else (self.rows, self.cols)


class Region(NamedTuple):
    """The rectangle `tensor_rect` of `tensor`. Its first element lies at (`shard_row`, `shard_col`) of a shard."""

    tensor: HFTensor
    tensor_rect: Rect
    shard_row: int = 0
    shard_col: int = 0

    @property
    def shard_rect(self) -> Rect:
        """The region's rectangle in coordinates of the shard."""
        return Rect(self.shard_row, self.shard_col, self.tensor_rect.rows, self.tensor_rect.cols)


@dataclass(frozen=True)
class Shard:
    """One parameter as one rank holds it. Example: `qkv_proj.weight` stacks q, k and v as three regions."""

    name: str
    rows: int
    cols: int
    regions: tuple[Region, ...]
    experts: int = 0  # if above 0, the live tensor is [experts, rows / experts, cols]; the shard stacks the experts' matrices vertically

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
        """Return the shape of the live scales, or () if the format is not quantized."""
        return (*self.shape[:-2], *format.scale_grid(self.shape[-2], self.cols)) if format.quantized else ()


def take_all(tensor: HFTensor) -> Region:
    return take_rows(tensor, 0, tensor.rows)


def take_rows(tensor: HFTensor, row: int, rows: int) -> Region:
    """Return rows [row, row + rows) of a tensor as a region."""
    return Region(tensor, Rect(row, 0, rows, tensor.cols))


def stack_regions(name: str, regions: list[Region], experts: int = 0) -> Shard:
    """Stack regions of equal width vertically. Regions that continue each other in their tensor are merged."""
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


def split(whole: Region, cut: Cut, part: int, parts: int, field: str) -> Region:
    """Return the `part`-th of `parts` equal ranges of "rows" or "cols". Raise GeometryError, naming `field`, if `parts` does not divide."""
    tensor, (row, col, rows, cols), _, _ = whole
    length, what = (rows, "rows") if cut == "rows" else (cols, "columns")
    if length % parts:
        raise GeometryError(field, parts, f"must divide the {length} {what} of {tensor.name}", "choose a smaller tensor-parallel size")
    size = length // parts
    return Region(tensor, Rect(row + part * size, col, size, cols) if cut == "rows" else Rect(row, col + part * size, rows, size))


def find_misaligned_region(shard: Shard, format: TensorFormat) -> Region | None:
    """Return the first region of a shard that cuts a block of its format: one whose edges are not all block edges or the tensor's end."""
    if format.block is None:
        return None
    height, width = format.block[0], format.block[1] or 1  # a format with one scale per row may be cut at any column
    for region in shard.regions:
        tensor, (row, col, rows, cols) = region.tensor, region.tensor_rect
        if row % height or region.shard_row % height or col % width or region.shard_col % width:
            return region
        if (rows % height and row + rows != tensor.rows) or (cols % width and col + cols != tensor.cols):
            return region
    return None


Cut = Literal["whole", "rows", "cols", "qkv", "heads", "vocabulary"]
"""How tensor-parallel ranks shard a weight. whole: replicated. rows, cols: equal parts of each piece, where gate and up are two pieces.
qkv: rows by heads, of which engine ranks share those of k and v if there are too few. heads: replicated in the trainer, rows by heads in
the engine, of which ranks share some if there are too few. vocabulary: by rows, with padding."""


REPLICATED = ("whole", "heads")  # cuts of weights of which every rank of the trainer has all


class Weight(NamedTuple):
    """One parameter of Megatron's. Weights with the same SGLang name are stacked vertically into one SGLang parameter."""

    pieces: tuple[Region, ...]  # rectangles of checkpoint tensors, stacked vertically
    megatron: str
    sglang: str  # SGLang's parameter name, or empty if SGLang has no such parameter
    cut: Cut
    expert: int | None = None  # number of the expert that owns the weight
    stacks: tuple[tuple[Region, ...], ...] = ()
    """Megatron's order of rows if it is not that of `pieces`: a rank owns an equal range of the rows of each stack."""
    kv_heads: int = 0  # heads of k and v of a weight with cut "qkv", or of one with cut "heads"


def make_weight(tensors: HFTensor | Sequence[HFTensor], megatron: str, cut: Cut, sglang: str = "", expert: int | None = None) -> Weight:
    """Return a weight made of whole tensors. SGLang's name defaults to the checkpoint's."""
    tensors = [tensors] if isinstance(tensors, HFTensor) else tensors
    return Weight(tuple(map(take_all, tensors)), megatron, sglang or tensors[0].name, cut, expert)


def make_vector(name: str, length: int, megatron: str, role: str = "norm", sglang: str = "") -> Weight:
    """Return a one-dimensional weight that is replicated on every rank."""
    return make_weight(HFTensor(name, length, 1, role, vector=True), megatron, "whole", sglang)


def cut_weight(weight: Weight, part: int, parts: int, field: str) -> list[Region]:
    """Return the share of the `part`-th of `parts` ranks in a weight with cut "whole", "heads", "rows" or "cols". Raise as `split` does."""
    return [piece if weight.cut in REPLICATED else split(piece, weight.cut, part, parts, field) for piece in weight.pieces]


def cut_vocabulary(name: str, weight: Weight, padded_rows: int, part: int, parts: int) -> Shard:
    """Return a rank's shard of an embedding with `padded_rows` over all ranks. Padding at its end belongs to no region."""
    tensor, rows = weight.pieces[0].tensor, padded_rows // parts
    first = min(part * rows, tensor.rows)
    return Shard(name, rows, tensor.cols, (take_rows(tensor, first, min(first + rows, tensor.rows) - first),))
