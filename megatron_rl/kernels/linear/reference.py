"""The reference backends (`precision.backend = "emulated"`) and their products, on any device: quantize, dequantize, multiply in FP32.

With power-of-two scales a dequantized product is exact before accumulation, so it differs from a block-scaled GEMM only in the order of the
FP32 sums. The operands are then BF16 numbers, which a CPU with AMX multiplies several times faster. On a CPU, trainer and engine both call
`fprop` and the products of adapters, so their bits are equal.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from megatron_rl.kernels.batch_invariant import bf16_operands, invariant_matmul, multiply_in_parts
from megatron_rl.kernels.linear.base import Operand
from megatron_rl.kernels.linear.gather import PendingOperand, gather_first, wait
from megatron_rl.kernels.sums import ranks
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import round_trip_1x128, round_trip_128x1
from megatron_rl.precision.int8 import int8_matmul
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import dequantize
from parallel.formats import TensorFormat


def value_dtype(x: torch.Tensor, scale_format: str) -> torch.dtype:
    """Return the dtype of the weight values to multiply x with: float32, or bfloat16 if that is exact and several times faster on a CPU.
    E4M3 values times powers of two are exact in BF16, products are summed in FP32, and the result is rounded to BF16 anyway."""
    exact = scale_format == "pow2" and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return torch.bfloat16 if exact else torch.float32


def fprop(x: torch.Tensor, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(x) . W^T as `[..., N]` in the dtype of x `[..., K]`; `weight` `[N, K]` holds dequantized blocks in `value_dtype` or
    float32."""
    values = round_trip_1x128(x, scale_format).to(weight.dtype)
    with _exact_operands(values, weight.shape[0], scale_format):
        return invariant_matmul(values, weight).to(x.dtype)


def fprop_by_tree(x: torch.Tensor, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return this rank's partial sum of `fprop` by the tree (`kernels.sums.reference`), unrounded: float32 `[..., N]`."""
    values = round_trip_1x128(x, scale_format).float()
    with _exact_operands(values, weight.shape[0], scale_format):
        return tree.multiply(values, weight)


def dgrad(dy: torch.Tensor, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(dy) . W as `[..., K]` in the dtype of dy `[..., N]`, with the blocks that `fprop` takes."""
    values = round_trip_1x128(dy, scale_format).to(weight.dtype)
    with _exact_operands(values, weight.shape[1], scale_format):
        return multiply_in_parts(values, weight).to(dy.dtype)


def wgrad(dy: torch.Tensor, x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(dy^T) . Q_128x1(x), float32 `[N, K]`, of dy `[T, N]` and x `[T, K]`, both quantized along the tokens."""
    dy_values, x_values = round_trip_128x1(dy, scale_format), round_trip_128x1(x, scale_format)
    with _exact_operands(x_values, x.shape[1], scale_format):
        return multiply_in_parts(dy_values.t(), x_values)


def _exact_operands(values: torch.Tensor, columns: int, scale_format: str) -> AbstractContextManager[None]:
    """Return the context to multiply quantized values in: E4M3 values times powers of two are BF16 numbers."""
    return bf16_operands(columns) if scale_format == "pow2" and values.dtype == torch.float32 and not values.is_cuda else nullcontext()


def project_down(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return an adapter's x A^T `[..., rank]` of x `[..., K]` and A `[rank, K]`, rounded to the dtype of x."""
    return invariant_matmul(x, a)


def project_up(h: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return an adapter's scale * h B^T `[..., N]` of h `[..., rank]` and B `[N, rank]`; the product is rounded before it is scaled."""
    return invariant_matmul(h, b) * scale


class DequantizedWeight:
    """The dequantized blocks of a weight in its own row order, computed on first use."""

    def __init__(self, blocks: QuantizedWeight, format: TensorFormat, row_order: torch.Tensor | None) -> None:
        self._blocks, self._format, self._row_order = blocks, format, row_order
        self._values: dict[torch.dtype, torch.Tensor] = {}

    def as_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._values:
            values, order = dequantize(self._blocks, self._format).to(dtype), self._row_order
            self._values[dtype] = values if order is None else torch.empty_like(values).index_copy_(0, order.to(values.device), values)
        return self._values[dtype]


class EmulatedBackend:
    """The reference FP8 backend, for weights of any shape and row order. An operand is the tensor itself; each product quantizes it."""

    gathered_tokens = 1
    gathers_bytes = False
    orders_rows = True

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
        return fprop(x.rows[0], self._values(x, weight), self.scale_format)

    def fprop_by_tree(self, x: Operand, weight: DequantizedWeight) -> torch.Tensor:
        return fprop_by_tree(x.rows[0], self._values(x, weight), self.scale_format)

    def fprop_slices(self, x: Operand, weight: DequantizedWeight, slices: int) -> torch.Tensor:
        multiply = partial(fprop, scale_format=self.scale_format)
        return ranks.multiply_slices(x.rows[0], self._values(x, weight), slices, multiply)

    def dgrad(self, dy: Operand, weight: DequantizedWeight) -> torch.Tensor:
        return dgrad(dy.rows[0], self._values(dy, weight), self.scale_format)

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        dw = wgrad(dy.columns[0], x.columns[0], self.scale_format)
        return dw if into is None else into.add_(dw)

    def _values(self, x: Operand, weight: DequantizedWeight) -> torch.Tensor:
        return weight.as_dtype(value_dtype(x.rows[0], self.scale_format))


class EmulatedInt8(EmulatedBackend):
    """The product of SGLang's INT8 layers. No trainer computes in INT8, so its backward products are never called."""

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> Any:
        return QuantizedWeight(blocks.data.float(), blocks.scale)

    def fprop(self, x: Operand, weight: Any) -> torch.Tensor:
        return int8_matmul(x.rows[0], *weight)

    def fprop_by_tree(self, x: Operand, weight: Any) -> torch.Tensor:
        """Return `fprop` in FP32. Integers add up exactly, but each rank of an engine quantizes and rounds its own part."""
        return self.fprop(x, weight).float()
