"""A quantized weight: its data and the scales of its blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from parallel.formats import TensorFormat


class QuantizedWeight(NamedTuple):
    """A quantized matrix: `data` [N, K], and `scale`, one per block, in the dtypes of a `TensorFormat`; value = data * its scale."""

    data: torch.Tensor
    scale: torch.Tensor


def expand_scales(scale: torch.Tensor, format: TensorFormat, rows: int, cols: int) -> torch.Tensor:
    """Return every element's scale: [rows, cols], or [rows, 1] where whole rows share one."""
    assert format.block is not None
    height, width = format.block
    by_row = scale.repeat_interleave(height, 0)[:rows]
    return by_row.repeat_interleave(width, 1)[:, :cols] if width else by_row
