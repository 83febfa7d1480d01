"""DeepGEMM's matrix products as shape functions, with the checks of `csrc/apis/gemm.hpp` and `csrc/utils/layout.hpp` for sm_90."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from megatron_rl.rehearsal.kernels import count, require

Pair = tuple[torch.Tensor, torch.Tensor]
_TMA = 16
"""Alignment in bytes that the tensor memory accelerator requires of addresses and strides."""


def install() -> None:
    module = ModuleType("deep_gemm")
    vars(module).update({function.__name__: function for function in STANDS_FOR.values()})
    sys.modules["deep_gemm"] = module


def get_mk_alignment_for_contiguous_layout() -> int:
    return 128


def fp8_gemm_nt(a: Pair, b: Pair, d: torch.Tensor, c: torch.Tensor | None = None, recipe: Any = None, **_: Any) -> None:
    """d [m, n] = a [m, k] @ b [n, k]^T (+ c)."""
    kernel = "deep_gemm.fp8_gemm_nt"
    recipe = recipe or (1, 128, 128)
    (m, k), (n, k_of_b) = _shape(kernel, a[0]), _shape(kernel, b[0])
    require(list(d.shape) == [m, n] and k == k_of_b, kernel, f"{[m, k]} x {[n, k_of_b]} into {list(d.shape)}")
    _check_result(kernel, d, c)
    _check_scales(kernel, a[1], m, k, recipe[0], recipe[2])
    _check_scales(kernel, b[1], n, k, recipe[1], recipe[2])
    one_d = recipe[1] == 1
    require(d.dtype == (torch.float32 if one_d else torch.bfloat16), kernel, f"{d.dtype} of recipe {recipe}")
    require(one_d == (c is not None), kernel, f"recipe {recipe} {'needs' if one_d else 'takes no'} c")
    require(k % _TMA == 0 and d.stride(0) * d.itemsize % _TMA == 0, kernel, f"strides of k = {k}, n = {n} are not multiples of 16 bytes")
    count("fp8", 2 * m * n * k, *a, *b, *([d] if c is None else [c, d]))


def m_grouped_fp8_gemm_nt_contiguous(a: Pair, b: Pair, d: torch.Tensor, grouped_layout: torch.Tensor, recipe: Any = None, **_: Any) -> None:
    """d [m, n] = a [m, k] @ b[expert of the row] [n, k]^T."""
    kernel = "deep_gemm.m_grouped_fp8_gemm_nt_contiguous"
    (m, k), (groups, n, k_of_b) = _shape(kernel, a[0]), _shape(kernel, b[0], 3)
    require(list(d.shape) == [m, n] and k == k_of_b, kernel, f"{[m, k]} x {[groups, n, k_of_b]} into {list(d.shape)}")
    require(d.dtype == torch.bfloat16 and d.stride(-1) == 1, kernel, f"the result is {d.dtype}")
    fits = grouped_layout.dtype == torch.int32 and list(grouped_layout.shape) == [m] and grouped_layout.is_contiguous()
    require(fits, kernel, f"experts of rows are {list(grouped_layout.shape)} {grouped_layout.dtype}")
    _check_scales(kernel, a[1], m, k, 1, 128)
    _check_scales(kernel, b[1], n, k, 128, 128, groups)
    count("fp8", 2 * m * n * k, *a, *b, d)


def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    ks: Sequence[int],
    grouped_layout: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Any = (1, 1, 128),
) -> None:
    """d[group] [m, n] += a[group] [m, k] @ b[group] [n, k]^T."""
    kernel = "deep_gemm.k_grouped_fp8_gemm_nt_contiguous"
    groups, m, n = _shape(kernel, d, 3, torch.float32)
    total = sum(ks)
    require(
        tuple(recipe) == (1, 1, 128) and not any(k % 128 for k in ks) and len(ks) == groups, kernel, f"groups {list(ks)}, recipe {recipe}"
    )
    require(
        a[0].numel() == total * m and b[0].numel() == total * n, kernel, f"{a[0].numel()} and {b[0].numel()} numbers for {total} tokens"
    )
    require(c is not None and c.is_contiguous() and d.is_contiguous(), kernel, "needs a contiguous sum to add to")
    require(grouped_layout.dtype == torch.int32 and grouped_layout.numel() == groups, kernel, f"groups' lengths are {grouped_layout.dtype}")
    count("fp8", 2 * m * n * total, *a, *b, c, d)


def _shape(kernel: str, x: torch.Tensor, dims: int = 2, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
    require(x.device.type == "cuda", kernel, f"an operand is on the {x.device.type}")
    require(x.dim() == dims and x.dtype == dtype, kernel, f"an operand is {list(x.shape)} {x.dtype}")
    require(x.stride(-1) == 1, kernel, f"an operand {list(x.shape)} does not have its contraction innermost")
    require(dims == 2 or x.stride(0) == x.shape[-1] * x.shape[-2], kernel, f"groups {list(x.shape)} do not follow each other")
    require(x.data_ptr() % _TMA == 0, kernel, f"an operand {list(x.shape)} does not begin at a multiple of 16 bytes")
    return x.shape


def _check_result(kernel: str, d: torch.Tensor, c: torch.Tensor | None) -> None:
    require(d.device.type == "cuda" and d.dim() == 2 and d.stride(-1) == 1, kernel, f"a result {list(d.shape)} on {d.device}")
    require(d.data_ptr() % _TMA == 0, kernel, "the result does not begin at a multiple of 16 bytes")
    if c is not None:
        same = c.shape == d.shape and c.stride() == d.stride() and c.dtype == d.dtype
        require(same, kernel, f"c is {list(c.shape)} {c.dtype}, the result {list(d.shape)} {d.dtype}")


def _check_scales(kernel: str, scale: torch.Tensor, mn: int, k: int, gran_mn: int, gran_k: int, groups: int | None = None) -> None:
    wanted = [*([groups] if groups is not None else []), -(-mn // gran_mn), -(-k // gran_k)]
    fits = scale.device.type == "cuda" and scale.dtype == torch.float32 and list(scale.shape) == wanted
    require(fits, kernel, f"scales are {list(scale.shape)} {scale.dtype} on {scale.device}, must be float32 {wanted}")
    if gran_mn == 1:
        aligned = -(-mn // 4) * 4
        if not ((scale.stride(-2) == 1 or mn == 1) and (scale.stride(-1) == aligned or scale.shape[-1] == 1)):
            torch.empty_strided(
                tuple(wanted), (1, aligned), dtype=torch.float32, device=scale.device
            )  # the aligned copy that DeepGEMM makes
    else:
        rows, cols = scale.shape[-2:]
        ordered = (scale.stride(-1) == 1 and scale.stride(-2) == cols) or (scale.stride(-1) == rows and scale.stride(-2) == 1)
        require(ordered or rows * cols == 1 or 1 in (rows, cols), kernel, f"scales {list(scale.shape)} with strides {list(scale.stride())}")


_FUNCTIONS = (fp8_gemm_nt, m_grouped_fp8_gemm_nt_contiguous, k_grouped_fp8_gemm_nt_contiguous, get_mk_alignment_for_contiguous_layout)
STANDS_FOR: dict[str, Callable[..., Any]] = {f"deep_gemm.{function.__name__}": function for function in _FUNCTIONS}
