"""FlashAttention 2 as torch's `varlen_attn` calls it, with the checks of `mha_varlen_fwd` and `mha_varlen_bwd` (flash_api.cpp) and the
workspace of the backward pass; and the forward pass of FlashAttention 3 in sgl-kernel (`kernels.attention.flash3`)."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import varlen  # noqa: F401 - registers the operators

from megatron_rl.kernels.attention import flash3
from megatron_rl.rehearsal.device import FakeGpu, add_handler, value_of
from megatron_rl.rehearsal.kernels import count, require
from megatron_rl.rehearsal.kernels.match import Call

_KERNEL = "FlashAttention 2"


def install() -> None:
    add_handler(torch.ops.torch_attn._varlen_attn.default, _forward)
    add_handler(torch.ops.torch_attn._varlen_attn_backward.default, _backward)
    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    package.flash_attn, module.flash_attn_varlen_func = module, flash_attn_varlen_func  # type: ignore[attr-defined]
    sys.modules |= {each.__name__: each for each in (package, module)}


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float,
    causal: bool,
    num_splits: int,
    return_softmax_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 3 in one split: (output, log-sums float32 [h, t]). Its rate was not measured and is taken to be FlashAttention 2's."""
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    shared = causal and num_splits == 1 and min(max_seqlen_q or 0, max_seqlen_k or 0) > 1
    require(shared, "FlashAttention 3", "not the engine's order of sums")
    output, log_sums = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
    count("attention", 2 * _count_products(q, cu_seqlens_q), q, k, v, output, log_sums)
    return output, log_sums


STANDS_FOR: dict[str, Callable[..., Any]] = {f"{flash3.KERNEL}.{flash_attn_varlen_func.__name__}": flash_attn_varlen_func}


def _forward(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    query, key, value, starts_q, starts_k = args[:5]
    _check(query, key, value, starts_q, starts_k)
    gpu.recorder.work("attention", 2 * _count_products(query, starts_q), query, key, value, query)
    return gpu.run(func, args, kwargs)


def _backward(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    gradient, query, key, value = args[:4]
    starts = next(arg for arg in args[4:] if isinstance(arg, torch.Tensor) and arg.dtype is torch.int32)
    _check(query, key, value, starts, starts)
    require(gradient.dtype == query.dtype and gradient.stride(-1) == 1, _KERNEL, f"the gradient is {gradient.dtype}")
    gpu.recorder.work("attention", 5 * _count_products(query, starts), query, key, value, gradient, query, query, key, value)
    out = gpu.run(func, args, kwargs)
    tokens, heads, width = query.shape
    padded = tokens + 128 * (len(starts) - 1)
    rounded = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    workspace = [gpu.make((padded, heads, rounded), torch.float32), gpu.make((heads, padded), torch.float32)]
    if key.shape[1] != heads:  # gradients of each query head, which are summed afterwards
        workspace += [gpu.make((tokens, heads, width), query.dtype) for _ in range(2)]
    for tensor in (*out, *workspace):
        gpu.recorder.hold(tensor, "FlashAttention's backward pass")
    return out


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor) -> None:
    call, given = Call(_KERNEL), locals()
    call.check_all(given, "query [T H D] half (* * 1); key [L K D] =query (* * 1); value [L K D] =query (* * 1)")
    call.check_all(given, "starts_q [*] int32; starts_k [*] int32")
    heads, kv_heads, width = (call.sizes[name] for name in "HKD")
    call.require(width <= 256 and width % 8 == 0, f"heads of {width} numbers: at most 256, a multiple of 8")
    call.require(heads % kv_heads == 0, f"{heads} query heads, {kv_heads} key heads")


def _count_products(query: torch.Tensor, starts: torch.Tensor) -> int:
    """Return the FLOPs of one product of causal attention, which computes half of the scores."""
    known = value_of(starts)
    lengths = [query.shape[0]] if known is None else known.diff().tolist()
    return sum(length * length for length in lengths) * query.shape[1] * query.shape[2]
