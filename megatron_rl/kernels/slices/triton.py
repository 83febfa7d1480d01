"""The Triton kernels of `kernels.slices.reference`, for formats with E4M3 data and blocks of 128x128.

A program has a tile of rows of one column of blocks, from a row on that is a multiple of the tile's: without a row order it lies in one
block. The largest of integers is the same in any order, so programs share a block's maximum by atomic operations.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.quantize.triton import LAUNCH, _e4m3_bytes
from megatron_rl.kernels.slices import WeightSlice
from parallel.formats import BLOCK

_ROWS = 32  # of a tile; divides a block
_INFINITY = tl.constexpr(0x7F800000)  # bits of float32


@triton.jit
def _locate(places, start, count, first, rows, cols, ORDERED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return places in the slice `[ROWS, TILE]`, which of them are in it, and the block of each row, or of all rows."""
    row = first + tl.program_id(0).to(tl.int64) * ROWS
    block, number = row // TILE, row + tl.arange(0, ROWS)
    if ORDERED:
        block = tl.load(places + number, mask=number < rows, other=0) // TILE
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = (number * cols - start)[:, None] + column[None, :]
    return at, (at >= 0) & (at < count) & (column < cols)[None, :], block * tl.cdiv(cols, TILE) + tl.program_id(1)


@triton.jit
def find_tile_maxima(
    values, places, maxima, start, count, first, rows, cols, ORDERED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """One program per tile of the slice `values` [count]; `maxima` are the bits of those of the blocks."""
    at, inside, block = _locate(places, start, count, first, rows, cols, ORDERED, ROWS, TILE)
    bits = tl.load(values + at, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.minimum(tl.max(bits, axis=1), _INFINITY)
    tl.atomic_max(maxima + block, largest if ORDERED else tl.max(largest, axis=0), sem="relaxed")


@triton.jit
def quantize_slice_tile(
    values, places, multipliers, data, start, count, first, rows, cols, ORDERED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """One program per tile of the slice `values` [count] and its bytes `data` [count]."""
    at, inside, block = _locate(places, start, count, first, rows, cols, ORDERED, ROWS, TILE)
    factor = tl.load(multipliers + block)
    scaled = tl.load(values + at, mask=inside, other=0.0) * (factor[:, None] if ORDERED else factor)
    tl.store(data + at, _e4m3_bytes(scaled), mask=inside)


def find_maxima(values: torch.Tensor, place: WeightSlice) -> torch.Tensor:
    """Compute `kernels.slices.reference.find_maxima`. Raise ValueError for another format."""
    maxima = values.new_zeros(place.format.scale_grid(place.rows, place.cols))
    _launch(find_tile_maxima, values, place, maxima.view(torch.int32))
    return maxima


def quantize_slice(values: torch.Tensor, place: WeightSlice, multipliers: torch.Tensor, into: torch.Tensor) -> None:
    """Compute `kernels.slices.reference.quantize_slice`. Raise ValueError for another format."""
    _launch(quantize_slice_tile, values, place, multipliers.contiguous(), into.view(torch.uint8))


def _launch(kernel: Any, values: torch.Tensor, place: WeightSlice, *tensors: torch.Tensor) -> None:
    if place.format.block != (BLOCK, BLOCK) or place.format.dtype != "float8_e4m3fn":
        raise ValueError(f"slices in {place.format.name} are not quantized on a GPU")
    first, stop = place.find_rows(values.numel())
    first -= first % _ROWS
    if values.numel():
        kernel[(triton.cdiv(stop - first, _ROWS), triton.cdiv(place.cols, BLOCK))](
            values, values if place.places is None else place.places, *tensors, place.start, values.numel(), first, place.rows, place.cols,
            ORDERED=place.places is not None, ROWS=_ROWS, TILE=BLOCK, **LAUNCH,
        )  # fmt: skip
