"""The product of SGLang's INT8 layers, on any device. No trainer computes in INT8, so it has no backward products."""

from __future__ import annotations

import torch

from megatron_rl.precision.backends.base import Operand
from megatron_rl.precision.int8 import int8_matmul
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import TensorFormat


class Int8Backend:
    """An operand is the tensor itself, quantized per token by the product."""

    def __init__(self, format: TensorFormat) -> None:
        pass

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> QuantizedWeight:
        """Return the INT8 numbers as float32 [N, K], and their scales; rows of whole-row scales are never reordered."""
        return QuantizedWeight(blocks.data.float(), blocks.scale)

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        return Operand(x.shape[0], (x,))

    def fprop(self, x: Operand, weight: QuantizedWeight) -> torch.Tensor:
        return int8_matmul(x.rows[0], *weight)
