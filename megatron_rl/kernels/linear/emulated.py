"""The reference backends, on any device, in any dtype, for weights of any shape and row order: of FP8, and of SGLang's INT8 layers."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.kernels.linear import products as fp8_products
from megatron_rl.kernels.linear.base import Operand
from megatron_rl.kernels.linear.gather import PendingOperand, gather_first, wait
from megatron_rl.precision.int8 import int8_matmul
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import dequantize
from parallel.formats import TensorFormat


class DequantizedWeight:
    """A weight's dequantized blocks in its own row order, made on first use."""

    def __init__(self, blocks: QuantizedWeight, format: TensorFormat, row_order: torch.Tensor | None) -> None:
        self._blocks, self._format, self._row_order = blocks, format, row_order
        self._values: dict[torch.dtype, torch.Tensor] = {}

    def as_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [N, K]."""
        if dtype not in self._values:
            values, order = dequantize(self._blocks, self._format).to(dtype), self._row_order
            self._values[dtype] = values if order is None else torch.empty_like(values).index_copy_(0, order.to(values.device), values)
        return self._values[dtype]


class EmulatedBackend:
    """An operand is the tensor itself: each product quantizes it, so nothing is quantized in vain."""

    gathered_tokens = 1
    gathers_bytes = False

    def __init__(self, format: TensorFormat) -> None:
        self.format, self.scale_format = format, format.scale_format

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> DequantizedWeight:
        return DequantizedWeight(blocks, self.format, row_order)

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        return Operand(x.shape[0], (x,) if rows else (), (x,) if columns else ())

    def start_gather(self, operand: Operand, group: Any) -> PendingOperand:
        (gathered, work), has_rows = gather_first((operand.rows or operand.columns)[0], group), bool(operand.rows)

        def finish() -> Operand:
            wait(work)
            return Operand(len(gathered), (gathered,) if has_rows else (), () if has_rows else (gathered,))

        return finish

    def fprop(self, x: Operand, weight: DequantizedWeight) -> torch.Tensor:
        return fp8_products.fprop(x.rows[0], self._values(x, weight), self.scale_format)

    def fprop_by_tree(self, x: Operand, weight: DequantizedWeight) -> torch.Tensor:
        return fp8_products.fprop_by_tree(x.rows[0], self._values(x, weight), self.scale_format)

    def dgrad(self, dy: Operand, weight: DequantizedWeight) -> torch.Tensor:
        return fp8_products.dgrad(dy.rows[0], self._values(dy, weight), self.scale_format)

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        dw = fp8_products.wgrad(dy.columns[0], x.columns[0], self.scale_format)
        return dw if into is None else into.add_(dw)

    def _values(self, x: Operand, weight: DequantizedWeight) -> torch.Tensor:
        return weight.as_dtype(fp8_products.value_dtype(x.rows[0], self.scale_format))


class EmulatedInt8(EmulatedBackend):
    """The product of SGLang's INT8 layers. No trainer computes in INT8, so its backward products are never asked for."""

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> Any:
        return QuantizedWeight(blocks.data.float(), blocks.scale)

    def fprop(self, x: Operand, weight: Any) -> torch.Tensor:
        return int8_matmul(x.rows[0], *weight)

    def fprop_by_tree(self, x: Operand, weight: Any) -> torch.Tensor:
        """Return what `fprop` does, in FP32: integers add up exactly, but an engine's ranks each quantize and round their part."""
        return self.fprop(x, weight).float()
