"""The quantizers of weights, by format: how a high-precision matrix becomes data and scales, and what these stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_rl.precision import fp8, int8
from megatron_rl.precision.quantized_weight import QuantizedWeight, expand_scales
from parallel.formats import TensorFormat

MaxOverRanks = Callable[[torch.Tensor], torch.Tensor]
"""Maxima of parts of rows, float32 [N, 1] -> those of the whole rows, whose other columns other ranks hold. Collective."""


class Quantizer(NamedTuple):
    """What one format needs."""

    quantize: Callable[[torch.Tensor, TensorFormat, MaxOverRanks], QuantizedWeight]
    """(weight [N, K], format, max_over_ranks) -> its blocks; edge blocks may be partial. Raises ValueError for inf or NaN. Where whole rows
    share a scale, it calls `max_over_ranks` on what it finds in its columns, whatever the values are."""
    read_scales: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
    """Scales -> the float32 numbers that they stand for."""
    scale: Callable[[torch.Tensor, TensorFormat], tuple[torch.Tensor, torch.Tensor]] | None = None
    """(block maxima float32, format) -> (scales as stored, numbers that values are multiplied by before they are cast to the format's
    dtype); needed where the trainer computes in the format (`precision.slices`)."""


QUANTIZERS = {
    "fp8": Quantizer(
        lambda weight, format, _: fp8.quantize_weight(weight, format.scale_format),
        scale=lambda maxima, format: fp8.compute_scales(maxima, format.scale_format),
    ),
    "int8": Quantizer(lambda weight, _, max_over_ranks: int8.quantize_int8_weight(weight, max_over_ranks(int8.row_maxima(weight)))),
}
"""By `TensorFormat.name`."""


def quantize(weight: torch.Tensor, format: TensorFormat, max_over_ranks: MaxOverRanks = lambda amax: amax) -> QuantizedWeight:
    """Quantize [N, K] in any float dtype; `max_over_ranks` where `weight` holds some columns only. Raise ValueError for inf or NaN."""
    return QUANTIZERS[format.name].quantize(weight, format, max_over_ranks)


def dequantize(weight: QuantizedWeight, format: TensorFormat) -> torch.Tensor:
    """Return float32 [N, K]."""
    scale = QUANTIZERS[format.name].read_scales(weight.scale)
    return weight.data.float() * expand_scales(scale, format, *weight.data.shape)


def store(name: str, value: torch.Tensor, format: TensorFormat) -> dict[str, torch.Tensor]:
    """Return a whole tensor of a checkpoint, by name, as `format` stores it; a quantised one as its data and its scales."""
    if not format.quantized:
        return {name: value.to(getattr(torch, format.dtype))}
    data, scale = quantize(value, format)
    return {name: data, format.scale_name(name): scale}
