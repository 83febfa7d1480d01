"""SGLang's kernels that are compiled at first use, by the checks of `sglang/kernels/jit/csrc`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.rehearsal.device import set_value, value_of
from megatron_rl.rehearsal.kernels import RefusedKernelError
from rollout_sglang.rehearsal.kernels.match import HALF, INDEX, Call


class _Module:
    """What `load_jit` returns: the functions of a compiled file."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any) -> None:
            key = f"{self._words[0]}.run" if name == "run" else name
            if key not in _KERNELS and key not in _TEMPLATED:
                raise RefusedKernelError(f"SGLang's JIT kernel {name} ({', '.join(self._words)}) is not known to the rehearsal")
            if key in _TEMPLATED:
                _TEMPLATED[key](self._words, *args)
            else:
                _KERNELS[key](*args)

        return call


def install() -> None:
    import sglang.kernels.jit.utils as utils

    utils.load_jit = lambda *words, **_: _Module(tuple(map(str, words)))


def _qknorm(q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float) -> None:
    """elementwise/qknorm.cuh"""
    call = Call("SGLang qknorm")
    call.check("q", q, "N Q D", HALF, "* D 1")
    call.check("k", k, "N K D", q.dtype, "* D 1")
    call.check("q_weight", q_weight, "D", q.dtype)
    call.check("k_weight", k_weight, "D", q.dtype)
    call.require(_is_normed_width(call.sizes["D"]), f"heads of {call.sizes['D']} numbers")
    call.moved(q, k, q_weight, k_weight, q, k)


def _rmsnorm(input: Any, weight: Any, out: Any, eps: float) -> None:
    """elementwise/rmsnorm.cuh"""
    call = Call("SGLang rmsnorm")
    call.check("input", input, "N D", HALF, "* 1")
    call.check("weight", weight, "D", input.dtype)
    call.check("out", out, "N D", input.dtype, "* 1")
    call.moved(input, weight, out)


def _is_normed_width(width: int) -> bool:
    return width in (64, 128, 256) or (width > 256 and width % 256 == 0 and width <= 8192)


def _rope(q: Any, k: Any, cos_sin_cache: Any, positions: Any) -> None:
    """elementwise/rope.cuh"""
    call = Call("SGLang rope")
    call.check("q", q, "N Q D", HALF, "* * 1")
    call.check("k", k, "N K D", q.dtype, "* * 1")
    call.check("cos_sin_cache", cos_sin_cache, "* D", torch.float32)
    call.check("positions", positions, "N", INDEX)
    call.moved(q, k, q, k, positions, cos_sin_cache[: q.shape[0]])


def _rope_and_store(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, cos_sin_cache: Any, positions: Any, out_loc: Any) -> None:
    """elementwise/rope.cuh"""
    call = Call("SGLang rope and store")
    call.check("q", q, "N Q D", HALF, "* D 1")
    call.check("k", k, "N K D", q.dtype, "* D 1")
    call.check("v", v, "N K D", q.dtype, "* D 1")
    call.check("cos_sin_cache", cos_sin_cache, "* D", torch.float32)
    call.check("positions", positions, "N", INDEX)
    call.check("out_loc", out_loc, "N", positions.dtype)
    row = str(call.sizes["K"] * call.sizes["D"])
    call.check("k_cache", k_cache, f"* {row}", q.dtype, "C 1")
    call.check("v_cache", v_cache, f"* {row}", q.dtype, "C 1")
    call.moved(q, k, v, q, k, v, positions, cos_sin_cache[: q.shape[0]])


def _store_cache(k: Any, v: Any, k_cache: Any, v_cache: Any, indices: Any, size_limit: int, skipped: int) -> None:
    """elementwise/kvcache.cuh"""
    call = Call("SGLang store_cache")
    call.check("k", k, "B DK", _ANY, "* 1")
    call.check("v", v, "B DV", k.dtype, "* 1")
    call.check("k_cache", k_cache, "* DK", k.dtype, "* 1")
    call.check("v_cache", v_cache, "* DV", k.dtype, "* 1")
    call.check("indices", indices, "B", INDEX, "*")
    call.moved(k, v, k, v, indices)


def _run_activation(input: Any, out: Any, kind: str) -> None:
    """elementwise/activation.cuh"""
    call = Call(f"SGLang {kind}_and_mul")
    call.check("out", out, "N D", (*HALF, torch.float32))
    call.check("input", input, f"N {2 * out.shape[-1]}", out.dtype)
    call.require(out.shape[-1] % (16 // out.itemsize) == 0, f"rows of {out.shape[-1]} numbers")
    call.moved(input, out)


def _run_activation_filtered(input: Any, out: Any, expert_ids: Any, step: int, kind: str) -> None:
    _run_activation(input, out, kind)
    Call(f"SGLang {kind}_and_mul").check("expert_ids", expert_ids, "*", torch.int32)


def _mask_topk(topk_ids: Any, num_token_non_padded: Any) -> None:
    """deepseek_v4/hash_topk.cuh"""
    call = Call("SGLang mask_topk_ids")
    call.check("topk_ids", topk_ids, "T K", torch.int32)
    count = num_token_non_padded
    call.require(count.dtype == torch.int32 or (count.device.type == "cpu" and count.dtype == torch.int64), f"the count is {count.dtype}")
    call.moved(topk_ids)


def _clamp_position(positions: Any, seq_lens: Any) -> None:
    """elementwise/clamp_position.cuh"""
    call = Call("SGLang clamp_position")
    call.check("positions", positions, "B", INDEX)
    call.check("seq_lens", seq_lens, "B", positions.dtype)
    call.moved(positions, seq_lens)
    set_value(positions, None if (known := value_of(seq_lens)) is None else (known - 1).clamp(0))


def _set_latents(kv_buffer: Any, loc: Any, k_nope: Any, k_rope: Any, warps: int, skipped: int) -> None:
    """elementwise/set_mla_kv_buffer.cuh: a row holds a latent and its rotated positions."""
    call = Call("SGLang set_mla_kv_buffer")
    call.check("k_nope", k_nope, "B N", _ANY, "* 1")
    call.check("k_rope", k_rope, "B R", k_nope.dtype, "* 1")
    call.check("kv_buffer", kv_buffer, f"* {k_nope.shape[-1] + k_rope.shape[-1]}", k_nope.dtype, "* 1")
    call.check("loc", loc, "B", INDEX, "*")
    call.moved(k_nope, k_rope, k_nope, k_rope, loc)


def _multiply_few_rows(words: tuple[str, ...], x: Any, w: Any, out: Any) -> None:
    """gemm/tiny_gemm.cuh, TinyNGemmKernel: few rows of x [M, K] times w [N, K]^T, a router's. A block has N_SPLIT columns and all of K."""
    call, (n, k, rows, split) = Call("SGLang tiny_n_gemm"), map(int, words[1:5])
    call.check("x", x, f"M {k}", torch.bfloat16, "X 1")
    call.check("w", w, f"{n} {k}", (torch.bfloat16, torch.float32))
    call.check("out", out, f"M {n}", (*HALF, torch.float32))
    call.require(x.shape[0] <= rows, f"{x.shape[0]} rows, compiled for {rows}")
    call.require(x.stride(0) * x.itemsize % 16 == 0, f"rows of x lie {x.stride(0)} numbers apart")
    threads = k // 16
    fits = k % 16 == 0 and threads % 32 == 0 and threads <= 1024 and n % split == 0 and rows * split <= threads
    call.require(fits, f"{[rows, k]} x {[k, n]} in blocks of {split} columns and {threads} threads")
    call.multiplied("bf16" if w.dtype == torch.bfloat16 else "fp32", 2 * x.shape[0] * n * k, x, w, out)


_ANY = (*HALF, torch.float32, torch.uint8, torch.float8_e4m3fn)
_KERNELS: dict[str, Callable[..., None]] = {
    "qknorm": _qknorm,
    "rmsnorm": _rmsnorm,
    "run_rope": _rope,
    "run_rope_store": _rope_and_store,
    "store_cache": _store_cache,
    "run_activation": _run_activation,
    "run_activation_filtered": _run_activation_filtered,
    "set_mla_kv_buffer": _set_latents,
    "clamp_position": _clamp_position,
    "dpsk_v4_mask_topk.run": _mask_topk,
}
"""By function; `run` by module."""
_TEMPLATED: dict[str, Callable[..., None]] = {"tiny_n_gemm.run": _multiply_few_rows}
"""Those that ask for what they were compiled for: the words that name their file."""
