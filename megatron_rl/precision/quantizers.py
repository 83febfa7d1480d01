"""The quantizers of weights, by format: how a high-precision matrix becomes data and scales, and what these stand for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rl.precision import fp8, int8
from megatron_rl.precision.quantized_weight import QuantizedWeight, expand_scales
from parallel.formats import TensorFormat

MaxOverRanks = Callable[[torch.Tensor], torch.Tensor]
"""Maxima of parts of rows, float32 [N, 1] -> those of the whole rows, whose other columns other ranks hold. Collective."""


class Quantizer:
    """Quantizes the weights of one format. A new one overrides `quantize`, and `read_scales` where scales are no floating-point numbers."""

    def quantize(self, weight: torch.Tensor, format: TensorFormat, max_over_ranks: MaxOverRanks | None = None) -> QuantizedWeight:
        """Quantize [N, K] in any float dtype; edge blocks may be partial. Raise ValueError where a value is inf or NaN.

        `max_over_ranks` is given where `weight` holds some columns only and whole rows share a scale; call it whatever the values are.
        """
        raise NotImplementedError

    def read_scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the float32 numbers that scales stand for."""
        return scale.float()

    def dequantize(self, weight: QuantizedWeight, format: TensorFormat) -> torch.Tensor:
        """Return float32 [N, K]."""
        return weight.data.float() * expand_scales(self.read_scales(weight.scale), format, *weight.data.shape)


class Fp8Quantizer(Quantizer):
    def quantize(self, weight: torch.Tensor, format: TensorFormat, max_over_ranks: MaxOverRanks | None = None) -> QuantizedWeight:
        return fp8.quantize_weight(weight, format.scale_format)


class Int8Quantizer(Quantizer):
    """Quantizes with the scales of whole rows, also where each rank holds some of their columns, so that the bytes equal those of the
    quantized checkpoint."""

    def quantize(self, weight: torch.Tensor, format: TensorFormat, max_over_ranks: MaxOverRanks | None = None) -> QuantizedWeight:
        amax = int8.row_maxima(weight)
        return int8.quantize_int8_weight(weight, amax if max_over_ranks is None else max_over_ranks(amax))


QUANTIZERS: dict[str, Quantizer] = {"fp8": Fp8Quantizer(), "int8": Int8Quantizer()}
"""By `TensorFormat.name`."""


def quantize(weight: torch.Tensor, format: TensorFormat, max_over_ranks: MaxOverRanks | None = None) -> QuantizedWeight:
    """Quantize [N, K] in a format; see `Quantizer.quantize`."""
    return QUANTIZERS[format.name].quantize(weight, format, max_over_ranks)


def dequantize(weight: QuantizedWeight, format: TensorFormat) -> torch.Tensor:
    """Return float32 [N, K]."""
    return QUANTIZERS[format.name].dequantize(weight, format)
