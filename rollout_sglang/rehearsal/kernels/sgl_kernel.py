"""What SGLang imports from sgl-kernel, by the checks of its sources (`sgl-kernel/csrc`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.rehearsal.fake_cuda import current_device
from rollout_sglang.rehearsal.kernels import flash_attention
from rollout_sglang.rehearsal.kernels.match import HALF, INDEX, Call


def install() -> None:
    """Names are bound when SGLang is imported, functions are found when they are called."""
    import sgl_kernel
    import sgl_kernel.flash_attn

    for path, function in STANDS_FOR.items():
        setattr(sgl_kernel.flash_attn if "flash_attn." in path else sgl_kernel, function.__name__, _late(function))


def _late(function: Any) -> Callable[..., Any]:
    module = sys.modules[function.__module__]
    return lambda *args, **named: getattr(module, function.__name__)(*args, **named)


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> torch.Tensor:
    call = Call("sgl_kernel.rmsnorm")
    call.check("input", input, "T H", HALF, "* 1")
    call.check("weight", weight, "H", input.dtype)
    if out is None:
        out = torch.empty_like(input)
    call.check("out", out, "T H", input.dtype, "* 1")
    call.moved(input, weight, out)
    return out


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None) -> None:
    call = Call("sgl_kernel.fused_add_rmsnorm")
    call.check("input", input, "T H", HALF)
    call.check("residual", residual, "T H", input.dtype)
    call.check("weight", weight, "H", input.dtype)
    call.moved(input, residual, weight, input, residual)


def silu_and_mul(input: torch.Tensor, out: Any = None) -> torch.Tensor:
    call = Call("sgl_kernel.silu_and_mul")
    call.require(input.shape[-1] * input.itemsize % 32 == 0, f"rows of {input.shape[-1]} numbers")
    if out is None:
        out = torch.empty(*input.shape[:-1], input.shape[-1] // 2, dtype=input.dtype, device=input.device)
    call.check("input", input.view(-1, input.shape[-1]), "T W", HALF)
    call.check("out", out.view(-1, out.shape[-1]), f"T {input.shape[-1] // 2}", input.dtype)
    call.moved(input, out)
    return out


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    cumsum_buffer: torch.Tensor,
    pad_sorted_token_ids: bool = False,
    ignore_invalid_expert: bool = False,
) -> None:
    """csrc/moe/moe_align_kernel.cu; one warp's lanes and shared memory hold up to 1,024 experts."""
    call = Call("sgl_kernel.moe_align_block_size")
    call.require(num_experts <= 1024, f"{num_experts} experts")
    call.check("topk_ids", topk_ids, "T K", INDEX)
    call.check("sorted_token_ids", sorted_token_ids, "S", torch.int32)
    call.check("experts_ids", experts_ids, "E", torch.int32)
    call.check("num_tokens_post_pad", num_tokens_post_pad, "1", torch.int32)
    call.check("cumsum_buffer", cumsum_buffer, "C", torch.int32)
    call.require(call.sizes["C"] > num_experts, f"a buffer of {call.sizes['C']} sums for {num_experts} experts")
    rows, room = topk_ids.numel(), call.sizes["E"] * block_size
    call.require(room >= call.sizes["S"] or room >= rows, f"{call.sizes['E']} blocks of {block_size} for {rows} rows")
    call.moved(topk_ids, sorted_token_ids, experts_ids)


def moe_sum_reduce(input_tensor: torch.Tensor, output_tensor: torch.Tensor, routed_scaling_factor: float = 0.0) -> None:
    """csrc/moe/moe_sum_reduce.cu"""
    call = Call("sgl_kernel.moe_sum_reduce")
    call.check("input_tensor", input_tensor, "T K H", (*HALF, torch.float32))
    call.check("output_tensor", output_tensor, "T H", input_tensor.dtype)
    call.moved(input_tensor, output_tensor)


def int8_scaled_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor, out_dtype: torch.dtype, bias: Any = None
) -> torch.Tensor:
    """csrc/gemm/int8_gemm_kernel.cu: a [M, K] by rows times b [K, N] by columns."""
    call = Call("sgl_kernel.int8_scaled_mm")
    call.check("mat_a", mat_a, "M K", torch.int8, "* 1")
    call.check("mat_b", mat_b, "K N", torch.int8, "1 *")
    m, n, k = (call.sizes[name] for name in "MNK")
    call.require(k % 16 == 0 and n % 8 == 0 and out_dtype in HALF, f"{[m, k]} x {[k, n]} into {out_dtype}")
    call.check("scales_a", scales_a.reshape(-1), "M", torch.float32)
    call.check("scales_b", scales_b.reshape(-1), "N", torch.float32)
    if bias is not None:
        call.check("bias", bias, "N", out_dtype)
    out = torch.empty(m, n, dtype=out_dtype, device=mat_a.device)
    call.multiplied("int8", 2 * m * n * k, mat_a, mat_b, scales_a, scales_b, out)
    return out


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form that keeps no memory: that of CUDA graphs is kept by the graphs."""
    gpu = current_device()
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return gpu.shapes.wrap(meta, tensor.device)


_FLASH_ATTENTION = (flash_attention.get_scheduler_metadata, flash_attention.flash_attn_with_kvcache, flash_attention.flash_attn_varlen_func)
_OTHERS = (rmsnorm, fused_add_rmsnorm, silu_and_mul, moe_align_block_size, moe_sum_reduce, int8_scaled_mm, weak_ref_tensor)
STANDS_FOR: dict[str, Callable[..., Any]] = {f"sgl_kernel.{function.__name__}": function for function in _OTHERS} | {
    f"sgl_kernel.flash_attn.{function.__name__}": function for function in _FLASH_ATTENTION
}
