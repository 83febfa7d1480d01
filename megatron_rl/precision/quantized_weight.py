"""A quantized weight: its data and the scales of its blocks."""

from typing import NamedTuple

import torch

from parallel.formats import TensorFormat


class QuantizedWeight(NamedTuple):
    """A quantized matrix: `data` `[N, K]` and one `scale` per block, in the dtypes of a `TensorFormat`; value = data * scale."""

    data: torch.Tensor
    scale: torch.Tensor


def expand_scales(scale: torch.Tensor, format: TensorFormat, rows: int, cols: int) -> torch.Tensor:
    """Return the scale of every element: `[rows, cols]`, or `[rows, 1]` if whole rows share a scale."""
    assert format.block is not None
    height, width = format.block
    by_row = scale.repeat_interleave(height, 0)[:rows]
    return by_row.repeat_interleave(width, 1)[:, :cols] if width else by_row
