"""The reference backend: `fp8.products` on any device, in any dtype, for weights of any shape and row order."""

from __future__ import annotations

import torch

from megatron_rl.fp8 import products
from megatron_rl.fp8.backends import Operand
from megatron_rl.fp8.quantize import Blocks, dequantize_weight


class Emulated:
    """An operand is the tensor itself: each product quantises it on the way, so nothing is quantised that no product asks for."""

    def __init__(self, scale_format: str) -> None:
        self.scale_format = scale_format

    def prepare(self, blocks: Blocks, row_order: torch.Tensor | None) -> torch.Tensor:
        """float32 [N, K]: the blocks' values in the weight's own row order."""
        values = dequantize_weight(blocks)
        return values if row_order is None else torch.empty_like(values).index_copy_(0, row_order.to(values.device), values)

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        return Operand(x.shape[0], (x,) if rows else (), (x,) if columns else ())

    def fprop(self, x: Operand, weight: torch.Tensor) -> torch.Tensor:
        return products.fprop(x.rows[0], weight, self.scale_format)

    def dgrad(self, dy: Operand, weight: torch.Tensor) -> torch.Tensor:
        return products.dgrad(dy.rows[0], weight, self.scale_format)

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        dw = products.wgrad(dy.columns[0], x.columns[0], self.scale_format)
        return dw if into is None else into.add_(dw)
