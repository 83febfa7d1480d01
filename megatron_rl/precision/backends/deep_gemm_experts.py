"""The products of all local experts of a rank at once, by DeepGEMM's grouped kernels.

Tokens are sorted by expert and padded (`token_groups`):

    FProp, DGrad   [T, K] x [E, N, K]: groups along the tokens, the expert of each row in an int32 table
    WGrad          groups along the contraction: every expert's tokens give a matrix [N, K] of their own

An expert's sums are those of a product of its own, block after block in order. All experts' blocks lie end to end, which costs a second
copy of their bytes beside the transposed one. Held against sgl-deep-gemm 0.2.3.post2: on sm_90 it takes groups of multiples of 128 along
both, skips those without tokens, and adds WGrad to what the result held.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.errors import RunError
from megatron_rl.precision.backends.base import Operand
from megatron_rl.precision.backends.deep_gemm import BLOCK_RECIPE, GROUP_RECIPE, DeepGemmBackend, DeepGemmWeight
from megatron_rl.precision.backends.token_groups import TokenGroups
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import BLOCK, TensorFormat


class DeepGemmExperts:
    """`DeepGemmBackend` for a list of experts whose weights have one shape."""

    def __init__(self, format: TensorFormat) -> None:
        self._single = DeepGemmBackend(format)

    def prepare(self, blocks: Sequence[QuantizedWeight]) -> DeepGemmWeight:
        """Stack the experts' blocks: `fprop` data [E, N, K] and scales [E, N/128, K/128], `dgrad` both transposed."""
        weights = [self._single.prepare(expert, None) for expert in blocks]
        fprop, dgrad = ([getattr(weight, side) for weight in weights] for side in ("fprop", "dgrad"))
        return DeepGemmWeight(*((_stack([data for data, _ in side]), torch.stack([scale for _, scale in side])) for side in (fprop, dgrad)))

    def quantize(self, x: torch.Tensor, groups: TokenGroups, *, rows: bool, columns: bool) -> Operand:
        """Quantize x bf16 [T, K], T rows of the groups. `columns` is flat, one [K, group] matrix after the other."""
        from megatron_rl.precision.backends.triton_quantize import quantize_activation

        row_pair, column_pair = quantize_activation(x, self._single.scale_format, rows=rows, columns=columns, groups=groups)
        return Operand(x.shape[0], row_pair or (), column_pair or ())

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize x bf16 [n, K] along K, for tokens that travel: int32 [n, K/4 + K/128], a token's bytes, then its scales."""
        from megatron_rl.precision.backends.triton_quantize import quantize_activation

        rows, _ = quantize_activation(x, self._single.scale_format, rows=True, columns=False)
        assert rows is not None
        data, scale = rows
        return torch.cat([data.view(torch.int32), scale.contiguous().view(torch.int32)], 1)

    def unpack(self, packed: torch.Tensor, groups: TokenGroups) -> Operand:
        """Return the rows that `quantize` gives, of n tokens that `pack` quantized."""
        width = packed.shape[1] * 32 // 33
        data = groups.spread(packed[:, :width])
        scale = packed.new_zeros(packed.shape[1] - width, groups.rows).t()  # as DeepGEMM reads them: tokens innermost
        scale.index_copy_(0, groups.places, packed[:, width:])
        return Operand(groups.rows, rows=(data.view(torch.float8_e4m3fn), scale.view(torch.float32)))

    def fprop(self, x: Operand, weight: DeepGemmWeight, groups: TokenGroups) -> torch.Tensor:
        """Return bf16 [T, N]; padding rows are zero."""
        return _multiply(x, weight.fprop, groups)

    def dgrad(self, dy: Operand, weight: DeepGemmWeight, groups: TokenGroups) -> torch.Tensor:
        """Return bf16 [T, K]; padding rows are zero."""
        return _multiply(dy, weight.dgrad, groups)

    def wgrad(self, dy: Operand, x: Operand, groups: TokenGroups) -> torch.Tensor:
        """Return float32 [E, N, K]; zero for an expert without tokens."""
        import deep_gemm

        (a, a_scale), (b, b_scale) = dy.columns, x.columns
        sums = torch.zeros(len(groups.lengths), len(a_scale), len(b_scale), dtype=torch.float32, device=a.device)
        if dy.tokens:
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
                (a, a_scale), (b, b_scale), sums, groups.lengths, groups.sizes, c=sums, recipe=GROUP_RECIPE
            )
        return sums


def _multiply(a: Operand, b: tuple[torch.Tensor, torch.Tensor], groups: TokenGroups) -> torch.Tensor:
    import deep_gemm

    if BLOCK % deep_gemm.get_mk_alignment_for_contiguous_layout():
        raise RunError(
            f"DeepGEMM is set to groups of {deep_gemm.get_mk_alignment_for_contiguous_layout()} rows, ours are padded to {BLOCK}"
        )
    product = torch.empty(a.tokens, b[0].shape[1], dtype=torch.bfloat16, device=b[0].device)
    if a.tokens:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a.rows, b, product, groups.experts, recipe=BLOCK_RECIPE)
    return product


def _stack(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([matrix.view(torch.uint8) for matrix in matrices]).view(matrices[0].dtype)
