"""Quantizers of weights by format: they convert a matrix to data and scales and back."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_rl.precision import fp8, int8
from megatron_rl.precision.quantized_weight import QuantizedWeight, expand_scales
from parallel.formats import TensorFormat

MaxOverRanks = Callable[[torch.Tensor], torch.Tensor]
"""Maps maxima of parts of rows, float32 `[N, 1]`, to maxima of whole rows, whose other columns are on other ranks. Collective."""


class Quantizer(NamedTuple):
    """The functions of one format."""

    quantize: Callable[[torch.Tensor, TensorFormat, MaxOverRanks], QuantizedWeight]
    """(weight `[N, K]`, format, max_over_ranks) -> blocks; edge blocks may be partial. Raises ValueError for inf or NaN. If whole rows
    share a scale, it always calls `max_over_ranks` on the maxima of its columns."""
    read_scales: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float  # converts stored scales to float32 numbers
    scale: Callable[[torch.Tensor, TensorFormat], tuple[torch.Tensor, torch.Tensor]] | None = None
    """(block maxima float32, format) -> (scales as stored, multipliers of the values before they are cast to the dtype of the format).
    Needed if the trainer computes in the format (`make_scales`)."""


QUANTIZERS = {
    "fp8": Quantizer(
        lambda weight, format, _: fp8.quantize_weight(weight, format.scale_format),
        scale=lambda maxima, format: fp8.compute_scales(maxima, format.scale_format),
    ),
    "int8": Quantizer(lambda weight, _, max_over_ranks: int8.quantize_int8_weight(weight, max_over_ranks(int8.row_maxima(weight)))),
}
"""By `TensorFormat.name`."""


def quantize(weight: torch.Tensor, format: TensorFormat, max_over_ranks: MaxOverRanks = lambda amax: amax) -> QuantizedWeight:
    """Quantize `[N, K]` of any float dtype. Pass `max_over_ranks` if `weight` has only some columns. Raise ValueError for inf or NaN."""
    return QUANTIZERS[format.name].quantize(weight, format, max_over_ranks)


def make_scales(maxima: torch.Tensor, format: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scales as stored, multipliers of the values) for block maxima of any shape, such as those of `kernels.slices`."""
    scale = QUANTIZERS[format.name].scale
    assert scale is not None
    return scale(maxima, format)


def dequantize(weight: QuantizedWeight, format: TensorFormat) -> torch.Tensor:
    """Return float32 `[N, K]`."""
    scale = QUANTIZERS[format.name].read_scales(weight.scale)
    return weight.data.float() * expand_scales(scale, format, *weight.data.shape)


def store(name: str, value: torch.Tensor, format: TensorFormat) -> dict[str, torch.Tensor]:
    """Return `{name: tensor}` of a checkpoint tensor as stored in `format`; a quantized tensor has an entry for its scales."""
    if not format.quantized:
        return {name: value.to(getattr(torch, format.dtype))}
    data, scale = quantize(value, format)
    return {name: data, format.scale_name(name): scale}
