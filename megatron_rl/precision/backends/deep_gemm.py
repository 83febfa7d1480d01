"""The backend `deep_gemm`: the kernels that SGLang serves with on Hopper, in the trainer.

Written against DeepGEMM 2.1 to 2.6 and SGLang's build of it, sgl-deep-gemm 0.2.3; both are imported as `deep_gemm`. On Hopper it takes
operands with the contraction innermost only ("NT"), so the weight's bytes are kept a second time, transposed, for DGrad.

    FProp, DGrad   1x128 . 128x128   bf16 out      recipe (1, 128, 128)
    WGrad          1x128 . 1x128     float32 out, added to what is there      recipe (1, 1, 128)

Sums run over 128 terms in the tensor core, then `sum += scale_a * scale_b * partial` in FP32, block after block in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_rl.errors import RunError
from megatron_rl.precision.backends.base import Operand
from megatron_rl.precision.fp8 import Fp8Weight
from parallel.formats import BLOCK

BLOCK_RECIPE = (1, 128, 128)
GROUP_RECIPE = (1, 1, 128)
_TMA_ALIGNMENT = 16  # bytes, of every address that the tensor memory accelerator writes to


class DeepGemmWeight(NamedTuple):
    """The same blocks for both directions: `fprop` data [N, K] and scales [N/128, K/128], `dgrad` both transposed."""

    fprop: tuple[torch.Tensor, torch.Tensor]
    dgrad: tuple[torch.Tensor, torch.Tensor]


class DeepGemmBackend:
    """bf16 in and out, widths in multiples of 128, a weight's rows in their own order; anything else is refused."""

    def __init__(self, scale_format: str) -> None:
        self.scale_format = scale_format

    def prepare(self, blocks: Fp8Weight, row_order: torch.Tensor | None) -> DeepGemmWeight:
        if row_order is not None or any(size % BLOCK for size in blocks.data.shape):
            raise RunError(f"deep_gemm cannot multiply with a weight {list(blocks.data.shape)} whose blocks are cut or reordered")
        return DeepGemmWeight((blocks.data, blocks.scale), (_transposed(blocks.data), blocks.scale.t().contiguous()))

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        from megatron_rl.precision.backends.triton_quantize import quantize_activation

        if x.dtype != torch.bfloat16:
            raise RunError(f"deep_gemm gives bf16, and was asked for {x.dtype}")
        of_rows, of_columns = quantize_activation(x, self.scale_format, rows=rows, columns=columns)
        return Operand(x.shape[0], of_rows or (), of_columns or ())

    def fprop(self, x: Operand, weight: DeepGemmWeight) -> torch.Tensor:
        return _multiply(x, weight.fprop)

    def dgrad(self, dy: Operand, weight: DeepGemmWeight) -> torch.Tensor:
        return _multiply(dy, weight.dgrad)

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        import deep_gemm

        (a, a_scale), (b, b_scale) = dy.columns, x.columns
        sums = (
            into if into is not None and supports_inplace_add(into) else torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
        )
        if dy.tokens:
            deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), sums, c=sums, recipe=GROUP_RECIPE)
        return sums if into is None or sums is into else into.add_(sums)


def _multiply(a: Operand, b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    import deep_gemm

    product = torch.empty(a.tokens, len(b[0]), dtype=torch.bfloat16, device=b[0].device)
    if a.tokens:
        deep_gemm.fp8_gemm_nt(a.rows, b, product, recipe=BLOCK_RECIPE)
    return product


def supports_inplace_add(buffer: torch.Tensor) -> bool:
    """Whether the kernel can add to a gradient buffer in place; the sum is the same FP32 addition otherwise."""
    return buffer.dtype == torch.float32 and buffer.is_contiguous() and buffer.data_ptr() % _TMA_ALIGNMENT == 0


def _transposed(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8).t().contiguous().view(data.dtype)
