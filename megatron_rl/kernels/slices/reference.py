"""Maxima and data of a slice of a weight, a few rows at a time."""

from collections.abc import Iterator

import torch

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.slices import WeightSlice
from megatron_rl.precision.fp8 import append_zeros

_VALUES_IN_CACHE = 1 << 17  # values that are quantized at a time: they and their temporaries fit in a core's cache


@with_kernel
def find_maxima(values: torch.Tensor, place: WeightSlice) -> torch.Tensor:
    """Return the largest magnitude of each block's part in the slice `values` float32 `[n]`: float32, one per block of the whole weight; 0
    for a block outside of the slice, inf for inf or NaN."""
    maxima = values.new_zeros(place.format.scale_grid(place.rows, place.cols))
    for blocks, tiles, _ in _split(values, place):
        largest = tiles.abs().amax(-1).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        maxima.scatter_reduce_(0, blocks[:, None].expand_as(largest), largest, "amax")
    return maxima


@with_kernel
def quantize_slice(values: torch.Tensor, place: WeightSlice, multipliers: torch.Tensor, into: torch.Tensor) -> None:
    """Write the data of the slice `values` float32 `[n]` to `into` `[n]`, in the dtype of the format. `multipliers` (`Quantizer.scale`)
    float32, one per block; the maxima behind them hold for all values."""
    for blocks, tiles, (low, high) in _split(values, place):
        data = (tiles * multipliers[blocks].unsqueeze(-1)).flatten(1)[:, : place.cols].reshape(-1)
        head = (place.start + low) % place.cols  # values of the first row that precede the slice
        into[low:high].copy_(data[head : head + high - low])


def _split(values: torch.Tensor, place: WeightSlice) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]]:
    """Yield a few rows at a time: the row of blocks of each row, int64 `[r]`; their values `[r, blocks, width]`, 0 outside of the slice;
    and where they begin and end in the slice."""
    assert place.format.block is not None
    height, width = place.format.block[0], place.format.block[1] or place.cols
    places = torch.arange(place.rows) if place.places is None else place.places
    step, end = max(_VALUES_IN_CACHE // place.cols, 1), place.start + values.numel()
    begin, stop = place.find_rows(values.numel())
    for first in range(begin, stop, step):
        last = min(first + step, stop)
        low, high = max(first * place.cols - place.start, 0), min(last * place.cols, end) - place.start
        part = values[low:high]
        if part.numel() < (last - first) * place.cols:
            whole = part.new_zeros((last - first) * place.cols)
            whole[place.start + low - first * place.cols :][: part.numel()] = part
            part = whole
        rows = append_zeros(part.view(last - first, place.cols), -1, -place.cols % width)
        yield places[first:last] // height, rows.unflatten(1, (-1, width)), (low, high)
