"""FlashAttention 3 of sgl-kernel: the checks of `mha_fwd` and the size of its scheduler's metadata (sgl-flash-attn,
`hopper/flash_api.cpp`). The workspace for splits of a long context is not counted."""

from typing import Any

import torch

from megatron_rl.kernels.attention import flash3
from megatron_rl.rehearsal.device import value_of
from megatron_rl.rehearsal.kernels.match import Call
from rollout_sglang.hooks import tree_reduction

_TYPES = "half|float8_e4m3fn"
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
    call.check_all({"cache_seqlens": cache_seqlens}, "cache_seqlens [B] int32")
    call.moved(cache_seqlens)
    size = _count_metadata(batch_size, max_seqlen_q, headdim, causal, page_size is not None)
    return torch.empty(size, dtype=torch.int32, device=cache_seqlens.device)


def _count_metadata(batch: int, longest_query: int, width: int, causal: bool, paged: bool) -> int:
    """Return the number of elements of the scheduler's metadata. A causal mask of a single query has no effect, except for heads of 128 in
    a paged cache."""
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
    call, given = Call("FlashAttention 3"), locals()
    unknown = {"k": k, "v": v, "rotary_cos": rotary_cos, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad} | others
    for name, value in unknown.items():
        call.require(value is None or value in (0, False), f"{name} is not known to the rehearsal")
    if tree_reduction.sums_by_ranks():
        shared = num_splits == 1 and scheduler_metadata is None and (max_seqlen_q or 0) >= flash3.MIN_QUERIES and causal
        call.require(shared, f"{num_splits} splits for {max_seqlen_q} queries are not the trainer's order of sums")
    call.require(page_table is not None and cu_seqlens_q is not None and max_seqlen_q is not None, "the cache or the batch is not ragged")
    call.check_all(given, f"q [T H D] {_TYPES} (* * 1); k_cache [P S K D] =q (* * * 1); v_cache [P S K V] =q (* * * 1)")
    call.check_all(given, "cu_seqlens_q [*] int32")
    call.sizes["B"] = len(cu_seqlens_q) - 1
    call.check_all(given, "page_table [B *] int32 (* 1)")
    heads, kv_heads, width, value_width = (call.sizes[name] for name in "HKDV")
    size = _count_metadata(call.sizes["B"], max_seqlen_q or 1, width, causal, True)
    scales = " ".join(f"{name}_descale [B K] float32 (* *);" for name in "qkv" if q.dtype.itemsize == 1)
    optional = f"{scales} cache_seqlens [B] int32; cu_seqlens_k_new [*] int32; scheduler_metadata [{size}] int32; qv [T H V] =q (* * 1)"
    for spec in optional.split("; "):
        if given[spec.split()[0]] is not None:
            call.check_all(given, spec)
    _check_heads(call, q.dtype)
    if qv is not None:
        call.require(width <= 64 and value_width >= 256, f"qv with heads of {width} and values of {value_width}")
    out, logsumexp = _make_results(call, q, out, q.dtype if q.dtype.itemsize == 2 else torch.bfloat16)
    lengths = None if cache_seqlens is None else value_of(cache_seqlens)
    tokens = int(lengths.sum()) if lengths is not None else call.sizes["B"] * (max_seqlen_q or 1)
    ends = None if lengths is None else torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    pairs = count_pairs(cu_seqlens_q, ends, q.shape[0], tokens // max(call.sizes["B"], 1), causal)
    item = k_cache.itemsize
    cache = torch.empty(tokens * kv_heads * (width + value_width) * item, dtype=torch.uint8, device="meta")  # read once per request
    multiplied = width + value_width + (value_width if qv is not None else 0)
    call.multiplied("bf16" if item == 2 else "fp8", 2 * pairs * heads * multiplied, q, out, cache)
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
    """q [tokens, heads, d]; k and v of the same requests, concatenated."""
    call = Call("FlashAttention 3")
    for name in ("page_table", "qv", "seqused_q", "seqused_k", "sinks"):
        call.require(others.get(name) is None, f"{name} is not known to the rehearsal")
    call.require(max_seqlen_q is not None and max_seqlen_k is not None, "max_seqlen_q or max_seqlen_k is missing")
    call.check_all(locals(), f"q [T H D] {_TYPES} (* * 1); k [L K D] =q (* * 1); v [L K V] =q (* * 1)")
    call.check_all(locals(), "cu_seqlens_q [B1] int32; cu_seqlens_k [B1] int32")
    _check_heads(call, q.dtype)
    out, logsumexp = _make_results(call, q, out, q.dtype)
    pairs = count_pairs(cu_seqlens_q, value_of(cu_seqlens_k), q.shape[0], max_seqlen_k or 0, causal)
    call.multiplied("bf16", 2 * pairs * call.sizes["H"] * (call.sizes["D"] + call.sizes["V"]), q, k, v, out)
    return (out, logsumexp, None, None) if return_softmax_lse else out


def _check_heads(call: Call, dtype: torch.dtype) -> None:
    heads, kv_heads, width, value_width = (call.sizes[name] for name in "HKDV")
    multiple = 16 if dtype.itemsize == 1 else 8
    even = width % multiple == 0 and value_width % multiple == 0
    call.require(even and width <= _LARGEST_HEAD, f"heads of {width}, values of {value_width}")
    if value_width != width:
        fits = (128 < width <= 192 and 96 < value_width <= 128) or (width <= 64 and value_width <= 512)
        call.require(fits and (value_width <= 256 or dtype.itemsize == 2), f"keys of {width} and values of {value_width} numbers")
    call.require(heads % kv_heads == 0, f"{heads} query heads, {kv_heads} key heads")


def _make_results(call: Call, q: torch.Tensor, out: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and its log-sum-exp."""
    if out is None:
        out = torch.empty(q.shape[0], call.sizes["H"], call.sizes["V"], dtype=dtype, device=q.device)
    call.check("out", out, "T H V", (dtype,), "* * 1")
    return out, torch.empty(call.sizes["H"], q.shape[0], dtype=torch.float32, device=q.device)


def count_pairs(starts: torch.Tensor, key_starts: torch.Tensor | None, tokens: int, keys: int, causal: bool) -> int:
    """Return the number of pairs of queries and keys. A causal mask hides half of the pairs among new tokens."""
    known = value_of(starts)
    if known is None or key_starts is None:
        return tokens * keys
    new, all_keys = known.diff().long(), key_starts.diff().long()
    return int((new * all_keys).sum()) - (int((new * (new - 1)).sum()) // 2 if causal else 0)
