"""A number format unknown to the source, like MXFP8: E4M3 values with one power-of-two scale (its exponent, a byte) per 1x32 block.

This is all that a new format takes: a row with its mode, a quantizer and a product. `registered` adds them for a test.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_rl.kernels.batch_invariant import invariant_matmul
from megatron_rl.kernels.linear import PRODUCTS, make_backend
from megatron_rl.kernels.linear.base import Operand
from megatron_rl.kernels.linear.reference import DequantizedWeight
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import append_zeros
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import QUANTIZERS, Quantizer, dequantize, quantize
from parallel.formats import FORMATS, MODES, Mode, TensorFormat

GROUP = 32
TOY = TensorFormat(
    "toy8",
    "float8_e4m3fn",
    (1, GROUP),
    scale_dtype="uint8",
    scale_format="e8m0",
    scale_suffix="_exponents",
    quantization=(("quant_method", "toy8"), ("weight_block_size", (1, GROUP))),
)
MODE = "toy8_unified"


def quantize_toy(weight: torch.Tensor, format: TensorFormat, max_over_ranks: Any) -> QuantizedWeight:
    cols = weight.shape[1]
    groups = append_zeros(weight.float(), -1, -cols % GROUP).unflatten(1, (-1, GROUP))
    amax = groups.abs().amax(2)
    if not torch.isfinite(amax).all():
        raise ValueError("weight holds inf or NaN")
    scale, multipliers = scale_toy(amax, format)
    return QuantizedWeight((groups * multipliers[..., None]).flatten(1)[:, :cols].to(torch.float8_e4m3fn).contiguous(), scale)


def scale_toy(amax: torch.Tensor, format: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    mantissa, exponent = torch.frexp(amax.clamp_min(2.0**-100))  # amax = mantissa * 2^exponent; E4M3's largest number is 0.875 * 2^9
    exponent = exponent - 9 + (mantissa > 0.875).int()
    return (exponent + 127).to(torch.uint8), torch.exp2(-exponent.float())


def read_exponents(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.float() - 127)


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of x quantized in groups along its last dimension."""
    return dequantize(quantize(x, TOY), TOY)


class ToyProduct:
    orders_rows = True

    def __init__(self, format: TensorFormat) -> None:
        self.format = format

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> torch.Tensor:
        return DequantizedWeight(blocks, self.format, row_order).as_dtype(torch.float32)

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        return Operand(x.shape[0], (x,) if rows else (), (x,) if columns else ())

    def fprop(self, x: Operand, weight: torch.Tensor) -> torch.Tensor:
        return invariant_matmul(round_trip(x.rows[0]), weight).to(x.rows[0].dtype)

    def fprop_by_tree(self, x: Operand, weight: torch.Tensor) -> torch.Tensor:
        return tree.multiply(round_trip(x.rows[0]).float(), weight)

    def dgrad(self, dy: Operand, weight: torch.Tensor) -> torch.Tensor:
        return (round_trip(dy.rows[0]) @ weight).to(dy.rows[0].dtype)

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        dw = round_trip(dy.columns[0].t()) @ round_trip(x.columns[0].t()).t()
        return dw if into is None else into.add_(dw)


@contextmanager
def registered() -> Iterator[None]:
    """Context manager in which the format is registered like any other: one row, one quantizer, one product."""
    additions: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = [
        (FORMATS, {TOY.name: TOY}),
        (MODES, {MODE: Mode(trainer=TOY, engine=TOY)}),
        (QUANTIZERS, {TOY.name: Quantizer(quantize_toy, read_exponents, scale_toy)}),
        (PRODUCTS, {(TOY.name, "emulated"): f"{__name__}:ToyProduct"}),
    ]
    with ExitStack() as added:
        for table, rows in additions:
            added.enter_context(mock.patch.dict(table, rows))
        yield
    make_backend.cache_clear()
