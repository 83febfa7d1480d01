"""Products of all local experts of a rank at once, by DeepGEMM's grouped kernels.

Tokens are sorted by expert and padded (`token_groups`):

    FProp, DGrad   [T, K] x [E, N, K]: groups along the tokens, with the expert of each row in an int32 table
    WGrad          groups along the contraction: the tokens of each expert give a matrix [N, K]

On Hopper, WGrad reads the tokens of each expert transposed; on Blackwell, as they are (`by_token` of `kernels.quantize.triton`). There,
DeepGEMM packs the scales of all operands at each call, and WGrad takes at most 128 experts.

The sums of an expert equal those of a separate product, block after block in order. The blocks of all experts are stacked in one tensor,
which costs a second copy besides the transposed one. Checked against sgl-deep-gemm 0.2.3.post2 on sm_90: groups are multiples of 128 along
both dimensions, groups without tokens are skipped, and WGrad is added to the result. Its source says the same of sm_100.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.errors import RunError
from megatron_rl.kernels.blackwell import is_blackwell
from megatron_rl.kernels.linear.base import Operand
from megatron_rl.kernels.linear.deep_gemm import BLOCK_RECIPE, GROUP_RECIPE, DeepGemmBackend, DeepGemmWeight, supports_inplace_add
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import BLOCK, TensorFormat

_MAX_GROUPS = 128  # groups of a product along the contraction on Blackwell (`csrc/jit_kernels/impls/smxx_layout.hpp`)


class DeepGemmExperts:
    """`DeepGemmBackend` for a list of experts with weights of equal shape."""

    def __init__(self, format: TensorFormat) -> None:
        self._single = DeepGemmBackend(format)
        self._by_token = is_blackwell()

    def prepare(self, blocks: Sequence[QuantizedWeight]) -> DeepGemmWeight:
        """Stack the blocks of the experts: `fprop` data `[E, N, K]` and scales `[E, N/128, K/128]`, `dgrad` with both transposed."""
        if len(blocks[0].data) % BLOCK:
            raise RunError(f"deep_gemm cannot multiply with experts {list(blocks[0].data.shape)} whose blocks are cut")
        for expert in blocks:
            self._single.check_weight(expert, None)
        return DeepGemmWeight(_stack([expert.data for expert in blocks]), torch.stack([expert.scale for expert in blocks]))

    def quantize(self, x: torch.Tensor, groups: TokenGroups, *, rows: bool, columns: bool) -> Operand:
        """Quantize tokens x bf16 `[n, K]`, spread to the T rows of the groups. `columns` data is flat, one `[K, group]` matrix after
        the other, or `[T, K]` on Blackwell."""
        from megatron_rl.kernels.quantize.triton import quantize_activation

        options: Any = {"rows": rows, "columns": columns, "groups": groups, "by_token": self._by_token}
        row_pair, column_pair = quantize_activation(x, self._single.scale_format, **options)
        return Operand(groups.rows, row_pair or (), column_pair or ())

    def quantize_swiglu(
        self, gate_up: torch.Tensor, gradient: torch.Tensor | None, groups: TokenGroups, *, rows: bool, columns: bool
    ) -> Operand:
        """Compute `SwiGLUBackend.quantize_swiglu` for rows `[T, 2 F]`."""
        from megatron_rl.kernels.swiglu.triton import quantize_swiglu

        options: Any = {"rows": rows, "columns": columns, "groups": groups, "by_token": self._by_token}
        row_pair, column_pair = quantize_swiglu(gate_up, gradient, self._single.scale_format, **options)
        return Operand(groups.rows, row_pair or (), column_pair or ())

    def quantize_weighed(
        self, gradient: torch.Tensor, outputs: torch.Tensor, weights: torch.Tensor, groups: TokenGroups, *, columns: bool
    ) -> tuple[Operand, torch.Tensor]:
        """Return (operand of gradient bf16 `[n, K]` times weights float32 `[n]`, rounded; gradient of the weights float32 `[n]`). The
        weights multiplied `outputs` bf16 `[T, K]`."""
        from megatron_rl.kernels.experts.triton import quantize_weighed

        options: Any = {"columns": columns, "by_token": self._by_token}
        rows, column_pair, of_weights = quantize_weighed(gradient, outputs, weights, groups, self._single.scale_format, **options)
        return Operand(groups.rows, rows, column_pair or ()), of_weights

    def pack(self, x: torch.Tensor, order: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """Quantize tokens x bf16 `[n, K]` along K and pack each at its places `order` `[n, k]`, to send them to other ranks: int32
        `[n k or rows, K/4 + K/128]`, bytes followed by scales."""
        from megatron_rl.kernels.experts.triton import pack

        return pack(x, order, self._single.scale_format, rows)

    def unpack(self, packed: torch.Tensor, groups: TokenGroups) -> Operand:
        """Return the rows of `quantize` for n tokens that `pack` quantized."""
        from megatron_rl.kernels.experts.triton import spread_packed

        return Operand(groups.rows, spread_packed(packed, groups))

    def fprop(self, x: Operand, weight: DeepGemmWeight, groups: TokenGroups) -> torch.Tensor:
        """Return bf16 `[T, N]`; padding rows of an expert are zero."""
        return _multiply(x, weight.fprop, groups)

    def dgrad(self, dy: Operand, weight: DeepGemmWeight, groups: TokenGroups) -> torch.Tensor:
        """Return bf16 `[T, K]`; padding rows are zero."""
        return _multiply(dy, weight.dgrad, groups)

    def wgrad(self, dy: Operand, x: Operand, groups: TokenGroups, into: Sequence[torch.Tensor]) -> None:
        """Add to the gradient buffers float32 `[N, K]` of the experts, in place if they are contiguous in memory."""
        import deep_gemm

        (a, a_scale), (b, b_scale) = dy.columns, x.columns
        buffer = view_as_one(into)
        sums = torch.zeros(len(into), *into[0].shape, dtype=torch.float32, device=a.device) if buffer is None else buffer
        if dy.tokens and self._by_token:
            _add_by_token((a, a_scale.t()), (b, b_scale.t()), groups, sums)
        elif dy.tokens:
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
                (a, a_scale), (b, b_scale), sums, groups.lengths, groups.sizes, c=sums, recipe=GROUP_RECIPE
            )
        if buffer is None:
            torch._foreach_add_(list(into), sums.unbind())


def _add_by_token(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], groups: TokenGroups, sums: torch.Tensor
) -> None:
    """Add the products of data `[T, N]` and `[T, K]` with scales `[T/128, N]` and `[T/128, K]` to sums float32 `[E, N, K]`."""
    import deep_gemm

    start = 0
    for first in range(0, len(sums), _MAX_GROUPS):
        part = slice(first, first + _MAX_GROUPS)
        end = start + sum(groups.lengths[part])
        rows, tiles, start = slice(start, end), slice(start // BLOCK, end // BLOCK), end
        if rows.start < end:
            pairs = [(data[rows], scale[tiles]) for data, scale in (a, b)]
            tables = groups.lengths[part], groups.sizes[part]
            deep_gemm.k_grouped_fp8_gemm_tn_contiguous(*pairs, sums[part], *tables, c=sums[part], recipe=GROUP_RECIPE)


def _multiply(a: Operand, b: tuple[torch.Tensor, torch.Tensor], groups: TokenGroups) -> torch.Tensor:
    import deep_gemm

    if BLOCK % (rows := deep_gemm.get_mk_alignment_for_contiguous_layout()):
        raise RunError(f"DeepGEMM is set to groups of {rows} rows, but groups are padded to {BLOCK}")
    product = torch.empty(a.tokens, b[0].shape[1], dtype=torch.bfloat16, device=b[0].device)
    if a.tokens:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a.rows, b, product, groups.experts, recipe=BLOCK_RECIPE)
    return product


def view_as_one(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return E matrices `[N, K]` as one tensor `[E, N, K]` for DeepGEMM, or None if they are not contiguous in memory."""
    first, size = matrices[0], matrices[0].numel()
    follow = all(
        matrix.untyped_storage()._cdata == first.untyped_storage()._cdata
        and matrix.storage_offset() == first.storage_offset() + number * size
        for number, matrix in enumerate(matrices)
    )
    return first.as_strided((len(matrices), *first.shape), (size, *first.stride())) if follow and supports_inplace_add(first) else None


def _stack(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([matrix.view(torch.uint8) for matrix in matrices]).view(matrices[0].dtype)
