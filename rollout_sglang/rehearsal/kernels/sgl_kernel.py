"""Kernels that SGLang imports from sgl-kernel and FlashInfer, with the checks of their sources (`sgl-kernel/csrc`)."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.rehearsal.fake_cuda import current_device
from megatron_rl.rehearsal.kernels.match import HALF, Call
from rollout_sglang.rehearsal.kernels import flash_attention


def install() -> None:
    """Replace the stubs' functions. Names are bound when SGLang is imported; functions are looked up when they are called."""
    import flashinfer.fused_moe
    import sgl_kernel
    import sgl_kernel.flash_attn
    import sgl_kernel.utils

    sgl_kernel.utils.is_arch_support_pdl = lambda: True  # from Hopper on
    flashinfer.fused_moe.fused_topk_deepseek = fused_topk_deepseek
    sys.modules["flashinfer.decode._grouped_size_compiled_for_decode_kernels"] = None  # type: ignore[assignment] # absent in 0.7
    for path, function in STANDS_FOR.items():
        if path.startswith("sgl_kernel."):
            setattr(sgl_kernel.flash_attn if "flash_attn." in path else sgl_kernel, function.__name__, _look_up_late(function))


def _look_up_late(function: Any) -> Callable[..., Any]:
    module = sys.modules[function.__module__]
    return lambda *args, **named: getattr(module, function.__name__)(*args, **named)


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> torch.Tensor:
    call = Call("sgl_kernel.rmsnorm")
    out = torch.empty_like(input) if out is None else out
    call.check_all(locals(), "input [T H] half (* 1); weight [H] =input; out [T H] =input (* 1)")
    call.moved(input, weight, out)
    return out


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None) -> None:
    call = Call("sgl_kernel.fused_add_rmsnorm")
    call.check_all(locals(), "input [T H] half; residual [T H] =input; weight [H] =input")
    call.moved(input, residual, weight, input, residual)


def gemma_rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> torch.Tensor:
    return rmsnorm(input, weight, eps, out)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    fused_add_rmsnorm(input, residual, weight, eps)


def silu_and_mul(input: torch.Tensor, out: Any = None) -> torch.Tensor:
    call, width = Call("sgl_kernel.silu_and_mul"), input.shape[-1]
    call.require(width * input.itemsize % 32 == 0, f"rows of {width} numbers")
    if out is None:
        out = torch.empty(*input.shape[:-1], width // 2, dtype=input.dtype, device=input.device)
    call.check_all({"input": input.view(-1, width), "out": out.view(-1, out.shape[-1])}, f"input [T W] half; out [T {width // 2}] =input")
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
    """csrc/moe/moe_align_kernel.cu. A warp's lanes and shared memory hold up to 1,024 experts."""
    call = Call("sgl_kernel.moe_align_block_size")
    call.require(num_experts <= 1024, f"{num_experts} experts")
    outputs = "sorted_token_ids [S] int32; experts_ids [E] int32; num_tokens_post_pad [1] int32; cumsum_buffer [C] int32"
    call.check_all(locals(), f"topk_ids [T K] index; {outputs}")
    call.require(call.sizes["C"] > num_experts, f"a buffer of {call.sizes['C']} sums for {num_experts} experts")
    rows, room = topk_ids.numel(), call.sizes["E"] * block_size
    call.require(room >= call.sizes["S"] or room >= rows, f"{call.sizes['E']} blocks of {block_size} for {rows} rows")
    call.moved(topk_ids, sorted_token_ids, experts_ids)


def moe_sum_reduce(input_tensor: torch.Tensor, output_tensor: torch.Tensor, routed_scaling_factor: float = 0.0) -> None:
    """csrc/moe/moe_sum_reduce.cu"""
    call = Call("sgl_kernel.moe_sum_reduce")
    call.check_all(locals(), "input_tensor [T K H] float; output_tensor [T H] =input_tensor")
    call.moved(input_tensor, output_tensor)


def int8_scaled_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor, out_dtype: torch.dtype, bias: Any = None
) -> torch.Tensor:
    """csrc/gemm/int8_gemm_kernel.cu: row-major a [M, K] times column-major b [K, N]."""
    call = Call("sgl_kernel.int8_scaled_mm")
    scales = {"scales_a": scales_a.reshape(-1), "scales_b": scales_b.reshape(-1)}
    operands = "mat_a [M K] int8 (* 1); mat_b [K N] int8 (1 *)"
    call.check_all(locals() | scales, f"{operands}; scales_a [M] float32; scales_b [N] float32")
    m, n, k = (call.sizes[name] for name in "MNK")
    call.require(k % 16 == 0 and n % 8 == 0 and out_dtype in HALF, f"{[m, k]} x {[k, n]} into {out_dtype}")
    if bias is not None:
        call.check("bias", bias, "N", (out_dtype,))
    out = torch.empty(m, n, dtype=out_dtype, device=mat_a.device)
    call.multiplied("int8", 2 * m * n * k, mat_a, mat_b, scales_a, scales_b, out)
    return out


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form that holds no memory. CUDA graphs hold the memory of theirs."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return current_device().shapes.wrap(meta, tensor.device)


def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: Any = True,
) -> None:
    """flashinfer/fused_moe/fused_routing_dsv3.py"""
    call = Call("flashinfer.fused_topk_deepseek")
    call.check_all(locals(), "scores [T N] float; bias [N] float; topk_values [T K] float; topk_indices [T K] index")
    experts = call.sizes["N"]
    fits = topk <= 8 and topk_group <= n_group and topk_group * n_group >= topk and experts % n_group == 0
    narrow = n_group == 1 or (experts // n_group <= 32 and experts // n_group * topk_group <= 128)
    call.require(fits and narrow and experts <= 384, f"{topk} of {experts} experts, {topk_group} of {n_group} groups")
    call.moved(scores, bias, topk_values, topk_indices)


_FLASH_ATTENTION = (flash_attention.get_scheduler_metadata, flash_attention.flash_attn_with_kvcache, flash_attention.flash_attn_varlen_func)
_NORMS = (rmsnorm, fused_add_rmsnorm, gemma_rmsnorm, gemma_fused_add_rmsnorm)
_OTHERS = (*_NORMS, silu_and_mul, moe_align_block_size, moe_sum_reduce, int8_scaled_mm, weak_ref_tensor)
STANDS_FOR: dict[str, Callable[..., Any]] = {
    **{f"sgl_kernel.{function.__name__}": function for function in _OTHERS},
    **{f"sgl_kernel.flash_attn.{function.__name__}": function for function in _FLASH_ATTENTION},
    "flashinfer.fused_moe.fused_topk_deepseek": fused_topk_deepseek,
}
