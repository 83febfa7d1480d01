"""The products of all local experts of a rank at once, by DeepGEMM's grouped kernels.

Tokens are sorted by expert, those of each expert padded with zeros to a multiple of 128, so that no block holds two experts:

    FProp, DGrad   [T, K] x [E, N, K]: groups along the tokens, the expert of each row in an int32 table
    WGrad          groups along the contraction: every expert's tokens give a matrix [N, K] of their own
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.errors import RunError
from megatron_rl.precision.backends.base import Operand
from megatron_rl.precision.backends.deep_gemm import BLOCK_RECIPE, GROUP_RECIPE, DeepGemmBackend, DeepGemmWeight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import BLOCK, TensorFormat


def pad_groups(counts: Sequence[int], device: torch.device | str) -> tuple[list[int], torch.Tensor]:
    """Return (each count rounded up to a multiple of 128, int64 [sum(counts)]: each token's row after padding)."""
    groups = [-(-count // BLOCK) * BLOCK for count in counts]
    positions, first = [], 0
    for count, length in zip(counts, groups, strict=True):
        positions.append(torch.arange(first, first + count, device=device))
        first += length
    return groups, torch.cat(positions)


class DeepGemmExperts:
    """`DeepGemmBackend` for a list of experts whose weights have one shape. `groups`: padded token counts, one per expert, 0 allowed."""

    def __init__(self, format: TensorFormat) -> None:
        self._single = DeepGemmBackend(format)

    def prepare(self, blocks: Sequence[QuantizedWeight]) -> DeepGemmWeight:
        """Stack the experts' blocks: `fprop` data [E, N, K] and scales [E, N/128, K/128], `dgrad` both transposed."""
        weights = [self._single.prepare(expert, None) for expert in blocks]
        fprop, dgrad = ([getattr(weight, side) for weight in weights] for side in ("fprop", "dgrad"))
        return DeepGemmWeight(*((_stack([data for data, _ in side]), torch.stack([scale for _, scale in side])) for side in (fprop, dgrad)))

    def quantize(self, x: torch.Tensor, groups: Sequence[int], *, rows: bool, columns: bool) -> Operand:
        """Quantize x bf16 [T, K], T the sum of `groups`. `columns` is flat, one [K, group] matrix after the other."""
        from megatron_rl.precision.backends.triton_quantize import quantize_activation

        row_pair, column_pair = quantize_activation(x, self._single.scale_format, rows=rows, columns=columns, groups=groups)
        return Operand(x.shape[0], row_pair or (), column_pair or ())

    def fprop(self, x: Operand, weight: DeepGemmWeight, groups: Sequence[int]) -> torch.Tensor:
        """Return bf16 [T, N]; padding rows are zero."""
        return _multiply(x, weight.fprop, groups)

    def dgrad(self, dy: Operand, weight: DeepGemmWeight, groups: Sequence[int]) -> torch.Tensor:
        """Return bf16 [T, K]; padding rows are zero."""
        return _multiply(dy, weight.dgrad, groups)

    def wgrad(self, dy: Operand, x: Operand, groups: Sequence[int]) -> torch.Tensor:
        """Return float32 [E, N, K]; zero for an expert without tokens."""
        import deep_gemm

        (a, a_scale), (b, b_scale) = dy.columns, x.columns
        sums = torch.zeros(len(groups), len(a_scale), len(b_scale), dtype=torch.float32, device=a.device)
        if dy.tokens:
            lengths = torch.tensor(groups, dtype=torch.int32, device=a.device)
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), sums, list(groups), lengths, sums, GROUP_RECIPE)
        return sums


def _multiply(a: Operand, b: tuple[torch.Tensor, torch.Tensor], groups: Sequence[int]) -> torch.Tensor:
    import deep_gemm

    if BLOCK % deep_gemm.get_mk_alignment_for_contiguous_layout():
        raise RunError(
            f"DeepGEMM is set to groups of {deep_gemm.get_mk_alignment_for_contiguous_layout()} rows, ours are padded to {BLOCK}"
        )
    device = b[0].device
    product = torch.empty(a.tokens, b[0].shape[1], dtype=torch.bfloat16, device=device)
    if a.tokens:
        expert = torch.arange(len(groups), dtype=torch.int32, device=device).repeat_interleave(torch.tensor(groups, device=device))
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a.rows, b, product, expert, recipe=BLOCK_RECIPE)
    return product


def _stack(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([matrix.view(torch.uint8) for matrix in matrices]).view(matrices[0].dtype)
