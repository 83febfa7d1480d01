"""Quantization of a weight whose master is sharded in flat slices: ranks agree on block maxima, then each quantizes its slice.

A slice begins and ends anywhere, even within a row or a block. Each rank finds the largest magnitude of its part of each block; the maximum
over ranks gives the scale on every rank. Data and scales equal those of the whole weight, bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_rl.precision.fp8 import append_zeros
from megatron_rl.precision.quantizers import QUANTIZERS
from parallel.formats import TensorFormat

_VALUES_IN_CACHE = 1 << 17
_VALUES_ON_DEVICE = 1 << 24  # values that are quantized at a time: on a CPU, they and their temporaries fit in a core's cache


@dataclass(frozen=True)
class WeightSlice:
    """The flat slice of a weight `[rows, cols]` that begins at element `start`. `row_order` is that of the layer, on the device of the
    values."""

    rows: int
    cols: int
    start: int
    format: TensorFormat
    row_order: torch.Tensor | None = None

    def find_maxima(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each block's part in the slice `values` float32 `[n]`: float32, one per block of the whole
        weight; 0 for a block outside of the slice, inf for inf or NaN."""
        assert self.format.block is not None
        maxima = values.new_zeros(self.format.scale_grid(self.rows, self.cols))
        for blocks, tiles, _ in self._split(values):
            largest = tiles.abs().amax(-1).nan_to_num_(nan=torch.inf, posinf=torch.inf)
            maxima.scatter_reduce_(0, blocks[:, None].expand_as(largest), largest, "amax")
        return maxima

    def quantize(self, values: torch.Tensor, multipliers: torch.Tensor, into: torch.Tensor) -> None:
        """Write the data of the slice to `into` `[n]`, in the dtype of the format. `multipliers` (`Quantizer.scale`) float32, one per
        block."""
        for blocks, tiles, (low, high) in self._split(values):
            data = (tiles * multipliers[blocks].unsqueeze(-1)).flatten(1)[:, : self.cols].reshape(-1)
            head = (self.start + low) % self.cols  # values of the first row that precede the slice
            into[low:high].copy_(data[head : head + high - low])

    def _split(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]]:
        """Yield a few rows at a time: the row of blocks of each row, int64 `[r]`; their values `[r, blocks, width]`, 0 outside of the
        slice; and where they begin and end in the slice."""
        assert self.format.block is not None
        height, width = self.format.block[0], self.format.block[1] or self.cols
        place_of_row = _invert(self.row_order, self.rows, values.device)
        step = max((_VALUES_ON_DEVICE if values.is_cuda else _VALUES_IN_CACHE) // self.cols, 1)
        end = self.start + values.numel()
        for first in range(self.start // self.cols, -(-end // self.cols), step):
            last = min(first + step, -(-end // self.cols))
            low, high = max(first * self.cols - self.start, 0), min(last * self.cols, end) - self.start
            part = values[low:high]
            if part.numel() < (last - first) * self.cols:
                whole = part.new_zeros((last - first) * self.cols)
                whole[self.start + low - first * self.cols :][: part.numel()] = part
                part = whole
            rows = append_zeros(part.view(last - first, self.cols), -1, -self.cols % width)
            yield place_of_row[first:last] // height, rows.unflatten(1, (-1, width)), (low, high)


def make_scales(maxima: torch.Tensor, format: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scales as stored, multipliers of the values) for block maxima of any shape."""
    scale = QUANTIZERS[format.name].scale
    assert scale is not None
    return scale(maxima, format)


def _invert(order: torch.Tensor | None, rows: int, device: torch.device) -> torch.Tensor:
    """Return the place of each row in quantized order, int64 `[rows]`."""
    places = torch.arange(rows, device=device)
    return places if order is None else torch.empty_like(places).index_copy_(0, order, places)
