"""FlashAttention 3 as sgl-kernel has it: the checks of `mha_fwd` and the size of its scheduler's metadata (sgl-flash-attn,
`hopper/flash_api.cpp`). What splits of a long context add up beside the result is not counted."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.rehearsal.device import value_of
from rollout_sglang.rehearsal.kernels.match import HALF, Call

_TYPES = (*HALF, torch.float8_e4m3fn)
_LARGEST_HEAD = 256


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    *,
    causal: bool = False,
    page_size: int | None = None,
    **_: Any,
) -> torch.Tensor:
    call = Call("FlashAttention 3 scheduler metadata", B=batch_size)
    call.check("cache_seqlens", cache_seqlens, "B", torch.int32)
    call.moved(cache_seqlens)
    size = _count_metadata(batch_size, max_seqlen_q, headdim, causal, page_size is not None)
    return torch.empty(size, dtype=torch.int32, device=cache_seqlens.device)


def _count_metadata(batch: int, longest_query: int, width: int, causal: bool, paged: bool) -> int:
    """Return how many numbers the scheduler's metadata has. A causal mask of one query is none, but for heads of 128 in a paged cache."""
    masked = causal and not (longest_query == 1 and (width <= 64 or width > 128 or not paged))
    return -(-batch // 4) * 4 * (3 + masked) + 1


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    *,
    return_softmax_lse: bool = False,
    out: Any = None,
    **others: Any,
) -> Any:
    """q [tokens, heads, d]; caches [pages, page size, kv heads, d]; page_table [requests, pages of the longest]."""
    call = Call("FlashAttention 3")
    unused = {"k": k, "v": v, "rotary_cos": rotary_cos, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad} | others
    for name, value in unused.items():
        call.require(value is None or value in (0, False), f"{name} is not known to the rehearsal")
    call.require(page_table is not None and cu_seqlens_q is not None and max_seqlen_q is not None, "the cache or the batch is not ragged")
    longest = max_seqlen_q or 1
    call.check("q", q, "T H D", _TYPES, "* * 1")
    call.check("k_cache", k_cache, "P S K D", q.dtype, "* * * 1")
    call.check("v_cache", v_cache, "P S K V", q.dtype, "* * * 1")
    call.check("cu_seqlens_q", cu_seqlens_q, "*", torch.int32)
    call.sizes["B"] = len(cu_seqlens_q) - 1
    call.check("page_table", page_table, "B *", torch.int32, "* 1")
    if cache_seqlens is not None:
        call.check("cache_seqlens", cache_seqlens, "B", torch.int32)
    if cu_seqlens_k_new is not None:
        call.check("cu_seqlens_k_new", cu_seqlens_k_new, "*", torch.int32)
    heads, kv_heads, width, value_width = (call.sizes[name] for name in "HKDV")
    _check_widths(call, q.dtype, width, value_width)
    call.require(heads % kv_heads == 0, f"{heads} query heads, {kv_heads} of keys")
    if qv is not None:
        call.require(width <= 64 and value_width >= 256, f"qv with heads of {width} and values of {value_width}")
        call.check("qv", qv, "T H V", q.dtype, "* * 1")
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if scale is not None and q.dtype.itemsize == 1:
            call.check(name, scale, "B K", torch.float32, "* *")
    if scheduler_metadata is not None:
        size = _count_metadata(call.sizes["B"], longest, width, causal, True)
        call.check("scheduler_metadata", scheduler_metadata, str(size), torch.int32)
    result = q.dtype if q.dtype.itemsize == 2 else torch.bfloat16
    if out is None:
        out = torch.empty(q.shape[0], heads, value_width, dtype=result, device=q.device)
    call.check("out", out, "T H V", result, "* * 1")
    logsumexp = torch.empty(heads, q.shape[0], dtype=torch.float32, device=q.device)
    _count(call, q, qv, out, cu_seqlens_q, cache_seqlens, longest, causal, k_cache.itemsize)
    return (out, logsumexp, None, None) if return_softmax_lse else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    return_softmax_lse: bool = False,
    out: Any = None,
    **others: Any,
) -> Any:
    """q [tokens, heads, d], k and v of the same requests, one after the other."""
    call = Call("FlashAttention 3")
    for name in ("page_table", "qv", "seqused_q", "seqused_k", "sinks"):
        call.require(others.get(name) is None, f"{name} is not known to the rehearsal")
    call.require(max_seqlen_q is not None and max_seqlen_k is not None, "lengths without the longest")
    call.check("q", q, "T H D", _TYPES, "* * 1")
    call.check("k", k, "L K D", q.dtype, "* * 1")
    call.check("v", v, "L K V", q.dtype, "* * 1")
    call.check("cu_seqlens_q", cu_seqlens_q, "B1", torch.int32)
    call.check("cu_seqlens_k", cu_seqlens_k, "B1", torch.int32)
    heads, kv_heads, width, value_width = (call.sizes[name] for name in "HKDV")
    _check_widths(call, q.dtype, width, value_width)
    call.require(heads % kv_heads == 0, f"{heads} query heads, {kv_heads} of keys")
    if out is None:
        out = torch.empty(q.shape[0], heads, value_width, dtype=q.dtype, device=q.device)
    call.check("out", out, "T H V", q.dtype, "* * 1")
    logsumexp = torch.empty(heads, q.shape[0], dtype=torch.float32, device=q.device)
    pairs = _count_pairs(cu_seqlens_q, value_of(cu_seqlens_k), q.shape[0], max_seqlen_k or 0, causal)
    call.multiplied("bf16", 2 * pairs * heads * (width + value_width), q, k, v, out)
    return (out, logsumexp, None, None) if return_softmax_lse else out


def _check_widths(call: Call, dtype: torch.dtype, width: int, value_width: int) -> None:
    multiple = 16 if dtype.itemsize == 1 else 8
    even = width % multiple == 0 and value_width % multiple == 0
    call.require(even and width <= _LARGEST_HEAD, f"heads of {width}, values of {value_width}")
    if value_width != width:
        fits = (128 < width <= 192 and 96 < value_width <= 128) or (width <= 64 and value_width <= 512)
        call.require(fits and (value_width <= 256 or dtype.itemsize == 2), f"keys of {width} and values of {value_width} numbers")


def _count(
    call: Call, q: torch.Tensor, qv: Any, out: torch.Tensor, starts: torch.Tensor, lengths: Any, longest: int, causal: bool, item: int
) -> None:
    """Count the products, and the keys and values that are read: each once for a request."""
    known = None if lengths is None else value_of(lengths)
    batch = call.sizes["B"]
    tokens = int(known.sum()) if known is not None else batch * longest
    ends = None if known is None else torch.nn.functional.pad(known.cumsum(0), (1, 0))
    pairs = _count_pairs(starts, ends, q.shape[0], tokens // max(batch, 1), causal)
    width = call.sizes["D"] + call.sizes["V"] + (call.sizes["V"] if qv is not None else 0)
    cache = torch.empty(tokens * call.sizes["K"] * (call.sizes["D"] + call.sizes["V"]) * item, dtype=torch.uint8, device="meta")
    call.multiplied("bf16" if item == 2 else "fp8", 2 * pairs * call.sizes["H"] * width, q, out, cache)


def _count_pairs(starts: torch.Tensor, key_starts: torch.Tensor | None, tokens: int, keys: int, causal: bool) -> int:
    """Return how many queries meet how many keys; a causal mask hides half of those among new tokens."""
    known = value_of(starts)
    if known is None or key_starts is None:
        return tokens * keys
    new, all_keys = known.diff().long(), key_starts.diff().long()
    return int((new * all_keys).sum()) - (int((new * (new - 1)).sum()) // 2 if causal else 0)
