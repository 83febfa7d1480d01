"""The backend `deep_gemm`: the kernels that SGLang serves with on Hopper, used in the trainer.

Written for DeepGEMM 2.1 to 2.6 and SGLang's build of it, sgl-deep-gemm 0.2.3; both are imported as `deep_gemm`. On Hopper it takes only
operands with the contraction innermost ("NT"), so a transposed copy of the weight's bytes is kept for DGrad.

    FProp, DGrad   1x128 . 128x128   bf16 out      recipe (1, 128, 128)
    WGrad          1x128 . 1x128     float32 out, added to the buffer      recipe (1, 1, 128)

The tensor core sums 128 terms, then `sum += scale_a * scale_b * partial` in FP32, block after block in order. DeepGEMM has no other order;
`kernels.sums.triton` sums by the tree.
"""

from functools import cached_property
from typing import Any

import torch

from megatron_rl.kernels.linear.base import GpuBackend, Operand
from megatron_rl.kernels.linear.gather import PendingOperand, start_gathering_columns, start_gathering_rows
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.kernels.transpose.reference import transpose_bytes
from megatron_rl.precision.fp8 import append_zeros
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import BLOCK

BLOCK_RECIPE = (1, 128, 128)
GROUP_RECIPE = (1, 1, 128)
_TMA_ALIGNMENT = 16  # alignment in bytes of addresses that the tensor memory accelerator writes to


class DeepGemmWeight:
    """The blocks for both products: `fprop` data `[..., N, K]` and scales `[..., N/128, K/128]`; `dgrad` holds both transposed, with N
    padded to whole blocks. It is made at the first backward pass, so a model that only scores has none."""

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.fprop = data, scale
        self._slices: dict[int, torch.Tensor] = {}

    def cut(self, slices: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return data and scales for `multiply_slices`. The scales of slices are copied once."""
        data, scale = self.fprop
        if slices not in self._slices:
            self._slices[slices] = cut_scales(scale, slices)
        return data, self._slices[slices]

    @cached_property
    def dgrad(self) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale = self.fprop
        return transpose_bytes(data, -data.shape[-2] % BLOCK), scale.mT.contiguous()


class DeepGemmBackend(GpuBackend):
    name = "deep_gemm"
    gathered_tokens = 1

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> DeepGemmWeight:
        self.check_weight(blocks, row_order)
        return DeepGemmWeight(*blocks)

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        from megatron_rl.kernels.quantize.triton import quantize_activation

        self.check_input(x)
        tokens, width = x.shape
        row_pair, column_pair = quantize_activation(append_zeros(x, -1, -width % BLOCK), self.scale_format, rows=rows, columns=columns)
        if column_pair is not None and width % BLOCK:
            scales = column_pair[1].t()[:, :width].clone(memory_format=torch.contiguous_format)
            column_pair = column_pair[0][:width], scales.t()  # WGrad needs no padding
        return Operand(tokens, row_pair or (), column_pair or ())

    def start_gather(self, operand: Operand, group: Any) -> PendingOperand:
        tokens, of_rows = operand.tokens * group.size(), bool(operand.rows)
        data, scale = operand.rows or operand.columns
        finish = (start_gathering_rows if of_rows else start_gathering_columns)(data, scale.t(), group)

        def wrap() -> Operand:
            data, scale = finish()
            return Operand(tokens, rows=(data, scale.t()[:tokens])) if of_rows else Operand(tokens, columns=(data, scale.t()))

        return wrap

    def fprop(self, x: Operand, weight: DeepGemmWeight) -> torch.Tensor:
        return _multiply(x, weight.fprop)

    def fprop_by_tree(self, x: Operand, weight: DeepGemmWeight) -> torch.Tensor:
        return tree.multiply_blocks(x.rows, weight.fprop)

    def fprop_slices(self, x: Operand, weight: DeepGemmWeight, slices: int) -> torch.Tensor:
        return multiply_slices(x.rows, weight.cut(slices))

    def dgrad(self, dy: Operand, weight: DeepGemmWeight) -> torch.Tensor:
        return _multiply(dy, weight.dgrad)

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        import deep_gemm

        (a, a_scale), (b, b_scale) = dy.columns, x.columns
        buffer = into if into is not None and supports_inplace_add(into) else None
        sums = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device) if buffer is None else buffer
        if dy.tokens:
            deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), sums, c=sums, recipe=GROUP_RECIPE)
        return sums if into is None or sums is into else into.add_(sums)


def _multiply(a: Operand, b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return multiply_slices(a.rows, (b[0], b[1].unsqueeze(0)))[0]


def cut_scales(scale: torch.Tensor, slices: int) -> torch.Tensor:
    """Return the scales `[N/128, K/128]` of slices of K, each dense, as DeepGEMM takes them: `[slices, N/128, K/128/slices]`."""
    return scale.unflatten(-1, (slices, -1)).movedim(-2, 0).contiguous()


def multiply_slices(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the products BF16 `[slices, T, N]` of slices of K, for (data `[T, K]`, scales `[T, K/128]`) and (data `[N, K]`, the result of
    `cut_scales`). Data and a's scales, column by column, are views."""
    import deep_gemm

    slices = len(b[1])
    products = torch.empty(slices, len(a[0]), len(b[0]), dtype=torch.bfloat16, device=b[0].device)
    parts = zip(*(tensor.chunk(slices, -1) for tensor in (*a, b[0])), strict=True)
    for product, scales, (rows, row_scales, blocks) in zip(products, b[1], parts, strict=True):
        if len(rows):
            deep_gemm.fp8_gemm_nt((rows, row_scales), (blocks, scales), product, recipe=BLOCK_RECIPE)
    return products


def supports_inplace_add(buffer: torch.Tensor) -> bool:
    """Return whether the kernel can add to a gradient buffer in place; if not, torch does the same FP32 addition."""
    return buffer.dtype == torch.float32 and buffer.is_contiguous() and buffer.data_ptr() % _TMA_ALIGNMENT == 0
