"""DeepGEMM's matrix products as shape functions, with the checks of `csrc/apis/gemm.hpp` and `csrc/utils/layout.hpp` (sm_90, sm_100)."""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from megatron_rl.rehearsal.hopper import PROPERTIES
from megatron_rl.rehearsal.kernels.match import Call
from megatron_rl.rehearsal.kernels.triton import count_owned

Pair = tuple[torch.Tensor, torch.Tensor]
_E4M3 = "float8_e4m3fn"
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
    call, recipe = Call("deep_gemm.fp8_gemm_nt"), recipe or (1, 128, 128)
    one_d = recipe[1] == 1
    call.check_all({"a": a[0], "b": b[0]}, f"a [M K] {_E4M3} (* 1); b [N K] {_E4M3} (* 1)")
    call.check_all({"d": d}, f"d [M N] {'float32' if one_d else 'bfloat16'} (S 1)")
    call.require(one_d == (c is not None), f"recipe {recipe} {'needs' if one_d else 'takes no'} c")
    if c is not None:
        call.check_all({"c": c}, "c [M N] float32 (S 1)")
    m, n, k = (call.sizes[name] for name in "MNK")
    _check_scales(call, a[1], m, k, recipe[0], recipe[2])
    _check_scales(call, b[1], n, k, recipe[1], recipe[2])
    call.require(k % _TMA == 0 and d.stride(0) * d.itemsize % _TMA == 0, f"strides of k = {k}, n = {n} are not multiples of 16 bytes")
    call.multiplied("fp8 WGrad" if one_d else "fp8", 2 * m * n * k, *a, *b, *([d] if c is None else [c, d]))


_deterministic = [False]


def use_deterministic_algorithms(enable: bool) -> None:
    _deterministic[0] = enable


def get_deterministic_algorithms() -> bool:
    return _deterministic[0]


def bf16_gemm_nt(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
    """d [m, n] = a [m, k] @ b [n, k]^T, by DeepGEMM's own kernel."""
    call = Call("deep_gemm.bf16_gemm_nt")
    call.check_all(locals(), "a [M K] bfloat16 (* 1); b [N K] bfloat16 (* 1); d [M N] bfloat16 (* 1)")
    m, n, k = (call.sizes[name] for name in "MNK")
    strides = [x.stride(0) * x.itemsize % _TMA for x in (a, b, d) if len(x) > 1]
    call.require(not any(strides), f"strides of k = {k}, n = {n} are not multiples of 16 bytes")
    call.require(_deterministic[0], "cuBLASLt multiplies outside of the deterministic mode")
    call.multiplied("bf16", 2 * m * n * k, a, b, d)


def m_grouped_fp8_gemm_nt_contiguous(a: Pair, b: Pair, d: torch.Tensor, grouped_layout: torch.Tensor, recipe: Any = None, **_: Any) -> None:
    """d [m, n] = a [m, k] @ b[expert of the row] [n, k]^T. Rows of expert -1 are skipped on Hopper."""
    call = Call("deep_gemm.m_grouped_fp8_gemm_nt_contiguous")
    call.check_all({"a": a[0], "b": b[0]}, f"a [M K] {_E4M3} (* 1); b [G N K] {_E4M3}")
    call.check_all(locals(), "d [M N] bfloat16 (* 1); grouped_layout [M] int32")
    groups, m, n, k = (call.sizes[name] for name in "GMNK")
    _check_scales(call, a[1], m, k, 1, 128)
    _check_scales(call, b[1], n, k, 128, 128, groups)
    call.multiplied("fp8", 2 * (count_owned(grouped_layout) if PROPERTIES.major == 9 else m) * n * k, *a, *b, d)


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
    call = Call("deep_gemm.k_grouped_fp8_gemm_nt_contiguous", G=len(ks))
    call.check_all(locals(), "d [G M N] float32; grouped_layout [G] int32; c [* * *] float32")
    assert c is not None
    m, n, total = call.sizes["M"], call.sizes["N"], sum(ks)
    call.require(PROPERTIES.major == 9, "it is for sm_90 only")
    _check_groups(call, ks, recipe)
    numbers = a[0].numel(), b[0].numel()
    call.require(numbers == (total * m, total * n), f"{numbers} numbers for {total} tokens")
    call.multiplied("fp8 WGrad", 2 * m * n * total, *a, *b, c, d)


def k_grouped_fp8_gemm_tn_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    ks: Sequence[int],
    grouped_layout: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Any = (1, 1, 128),
) -> None:
    """d[group] [m, n] += a[group] [k, m]^T @ b[group] [k, n]."""
    call = Call("deep_gemm.k_grouped_fp8_gemm_tn_contiguous", G=len(ks), K=sum(ks), T=sum(ks) // 128)
    call.require(PROPERTIES.major == 10, "it is for sm_100 only")
    call.check_all({"a": a[0], "b": b[0]}, f"a [K M] {_E4M3} (M 1); b [K N] {_E4M3} (N 1)")
    call.check_all({"a_scale": a[1], "b_scale": b[1]}, "a_scale [T M] float32 (M 1); b_scale [T N] float32 (N 1)")
    call.check_all(locals(), "d [G M N] float32; grouped_layout [G] int32; c [G M N] float32")
    assert c is not None
    _check_groups(call, ks, recipe)
    m, n, words = call.sizes["M"], call.sizes["N"], sum(-(-k // 512) for k in ks)
    call.require(len(ks) <= 128 and not (m % 4 or n % 4), f"{len(ks)} groups of [{m}, {n}]")
    packed = [torch.empty(words, width, dtype=torch.int32, device=d.device) for width in (m, n)]
    call.multiplied("fp8 WGrad", 2 * m * n * sum(ks), *a, *b, *packed, c, d)


def _check_groups(call: Call, ks: Sequence[int], recipe: Any) -> None:
    call.require(tuple(recipe) == (1, 1, 128) and not any(k % 128 for k in ks), f"groups {list(ks)}, recipe {recipe}")


def _check_scales(call: Call, scale: torch.Tensor, mn: int, k: int, gran_mn: int, gran_k: int, groups: int | None = None) -> None:
    lead = [groups] if groups is not None else []
    if PROPERTIES.major != 9:  # packed scales of each row, or FP32 scales, which DeepGEMM packs into another tensor
        shape, rows = [*lead, mn, -(-k // (4 * gran_k))], -(-mn // 4) * 4
        if scale.dtype == torch.int32:
            strides = scale.stride(-1) == rows or shape[-1] == 1, scale.stride(-2) == 1 or mn == 1
            call.require(list(scale.shape) == shape and all(strides), f"packed scales are {list(scale.shape)} {list(scale.stride())}")
            return
        spread = scale if gran_mn == 1 else torch.empty(*lead, mn, scale.shape[-1], dtype=torch.float32, device=scale.device)
        torch.empty(*lead, shape[-1], rows, dtype=torch.int32, device=spread.device)
    wanted = [*lead, -(-mn // gran_mn), -(-k // gran_k)]
    fits = scale.device.type == "cuda" and scale.dtype == torch.float32 and list(scale.shape) == wanted
    call.require(fits, f"scales are {list(scale.shape)} {scale.dtype} on {scale.device}, must be float32 {wanted}")
    if PROPERTIES.major != 9:
        return
    if gran_mn == 1:
        aligned = -(-mn // 4) * 4
        if not ((scale.stride(-2) == 1 or mn == 1) and (scale.stride(-1) == aligned or scale.shape[-1] == 1)):
            # the aligned copy that DeepGEMM makes
            torch.empty_strided(tuple(wanted), (1, aligned), dtype=torch.float32, device=scale.device)
    else:
        rows, cols = scale.shape[-2:]
        ordered = (scale.stride(-1) == 1 and scale.stride(-2) == cols) or (scale.stride(-1) == rows and scale.stride(-2) == 1)
        call.require(ordered or rows * cols == 1 or 1 in (rows, cols), f"scales {list(scale.shape)} with strides {list(scale.stride())}")


_FUNCTIONS = (
    bf16_gemm_nt,
    fp8_gemm_nt,
    use_deterministic_algorithms,
    get_deterministic_algorithms,
    m_grouped_fp8_gemm_nt_contiguous,
    k_grouped_fp8_gemm_nt_contiguous,
    k_grouped_fp8_gemm_tn_contiguous,
    get_mk_alignment_for_contiguous_layout,
)
STANDS_FOR: dict[str, Callable[..., Any]] = {f"deep_gemm.{function.__name__}": function for function in _FUNCTIONS}
