"""Quantization of a weight whose master is sharded in flat slices: ranks agree on block maxima, then each quantizes its slice.

A slice begins and ends anywhere, even within a row or a block. Each rank finds the largest magnitude of its part of each block; the maximum
over ranks gives the scale on every rank. Data and scales equal those of the whole weight, bit for bit.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from parallel.formats import TensorFormat


@dataclass(frozen=True)
class WeightSlice:
    """The flat slice of a weight `[rows, cols]` that begins at element `start`. `row_order` is that of the layer, on the device of the
    values."""

    rows: int
    cols: int
    start: int
    format: TensorFormat
    row_order: torch.Tensor | None = None

    @cached_property
    def places(self) -> torch.Tensor | None:
        """The place of each row in quantized order, int64 `[rows]`, or None if it is the row's own."""
        return None if self.row_order is None else self.row_order.argsort()

    def find_rows(self, count: int) -> tuple[int, int]:
        """Return the first row of which `count` values from `start` on have a part, and the first row behind them."""
        return self.start // self.cols, -(-(self.start + count) // self.cols)
