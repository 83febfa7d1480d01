"""SGLang's attention in Triton, which Blackwell engines use (`sglang/kernels/ops/attention/{extend,decode}_attention.py`).

A prompt's new tokens attend to each other and to their part of the cache. A decoded token attends to its context in parts (`splits`), whose
results a second kernel joins. Windows, masks, sinks, other scores, and pages of more than one token are refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_rl.rehearsal.device import value_of
from megatron_rl.rehearsal.kernels.match import Call, Kernel

Given = Mapping[str, Any]
_UNKNOWN = ("SCORE_MOD", "USE_CUSTOM_MASK", "HAS_SINK", "SKIP_PREFIX", "SKIP_EXTEND", "STORE_LSE", "logit_cap")
_SLOTS = "kv_indptr [*] int32; kv_indices [*] int64"
_CACHE = "K_Buffer [S G D] half (* * 1); V_Buffer [S G V] =K_Buffer (* * 1)"


def _refuse_unknown(call: Call, given: Given) -> None:
    for name in _UNKNOWN:
        call.require(not given.get(name), f"{name} is not known to the rehearsal")
    call.require(given.get("SLIDING_WINDOW_SIZE", -1) <= 0, "a window is not known to the rehearsal")
    call.require(given["PAGE_SIZE"] == 1, f"pages of {given['PAGE_SIZE']} tokens are not known to the rehearsal")


def _count_lengths(starts: torch.Tensor, requests: int) -> torch.Tensor | None:
    """Return the requests' lengths int64 `[requests]`, or None if they are unknown, as in a capture."""
    known = value_of(starts)
    return None if known is None else known[: requests + 1].diff().long()


def _describe_cache(given: Given, tokens: int) -> torch.Tensor:
    """Return what is read of the cache. The values of latent attention are a part of its keys."""
    keys, values = given["K_Buffer"], given["V_Buffer"]
    shared = keys.untyped_storage()._cdata == values.untyped_storage()._cdata
    width = keys.shape[2] if shared else keys.shape[2] + values.shape[2]
    return torch.empty(tokens, keys.shape[1], width, dtype=keys.dtype, device="meta")


def _extend(call: Call, given: Given) -> None:
    """Multiply new queries with new keys, half of which a causal mask hides, and with all keys of the cache. Without a prefix, the cache
    may have other widths, as in latent attention, whose prompts are multiplied in the expanded form."""
    call.require("Q_Extend" in given, "only that of extend_attention.py is known to the rehearsal")
    _refuse_unknown(call, given)
    call.check_all(given, "Q_Extend [T H D] half (* * 1); K_Extend [T G D] =Q_Extend (* * 1); V_Extend [T G V] =Q_Extend (* * 1)")
    call.check_all(given, f"O_Extend [T H V] =Q_Extend (* * 1); {_SLOTS}; qo_indptr [*] int64")
    heads, groups, requests = call.sizes["H"], call.sizes["G"], len(given["qo_indptr"]) - 1
    call.require(heads == groups * given["kv_group_num"], f"{heads} query heads, {groups} key heads")
    new, before = _count_lengths(given["qo_indptr"], requests), _count_lengths(given["kv_indptr"], requests)
    tokens, cached = call.sizes["T"], len(given["kv_indices"])
    if cached:
        call.check_all(given, _CACHE)
    if new is None or before is None:
        pairs = tokens * (tokens + cached)
    else:
        cached = int(before.sum())
        pairs = int((new * before).sum() + (new * (new + 1) // 2 if given["IS_CAUSAL"] else new * new).sum())
    moved = [given[name] for name in ("Q_Extend", "K_Extend", "V_Extend", "O_Extend")]
    call.multiplied("bf16", 2 * pairs * heads * (call.sizes["D"] + call.sizes["V"]), *moved, _describe_cache(given, cached))


def _decode(call: Call, given: Given) -> None:
    """Multiply a query with its context. All splits count as written, although a short context has fewer."""
    _refuse_unknown(call, given)
    call.check_all(given, f"Q [B H D] half (* * 1); {_CACHE}; {_SLOTS}")
    call.check_all(given, "Att_Out [* H P V] float32 (* * * 1); Att_Lse [* H P] float32; num_kv_splits [*] int32")
    requests, heads, groups = (call.sizes[name] for name in "BHG")
    call.require(heads == groups * given["kv_group_num"], f"{heads} query heads, {groups} key heads")
    call.require(min(map(len, (given["Att_Out"], given["num_kv_splits"]))) >= requests, f"no room for {requests} requests")
    lengths = _count_lengths(given["kv_indptr"], requests)
    pairs = requests if lengths is None else int(lengths.sum())
    parts = (given["Att_Out"][:requests], given["Att_Lse"][:requests])
    call.multiplied("bf16", 2 * pairs * heads * (call.sizes["D"] + call.sizes["V"]), given["Q"], _describe_cache(given, pairs), *parts)


def _join(call: Call, given: Given) -> None:
    call.require(not given["HAS_SINK"], "HAS_SINK is not known to the rehearsal")
    call.check_all(given, "O [B H V] half (* * 1); Mid_O [* H P V] float32 (* * * 1); Mid_O_1 [* H P] float32")
    requests = call.sizes["B"]
    call.moved(given["Mid_O"][:requests], given["Mid_O_1"][:requests], given["O"])


def _list_slots(call: Call, given: Given) -> None:
    call.require(given.get("ENTRY_PAGE_SIZE", 1) == 1, "tables of pages are not known to the rehearsal")
    call.check_all(given, "req_to_token_ptr [* *] int32 (* 1); req_pool_indices_ptr [B] index; page_kernel_lens_ptr [B] index")
    call.check_all(given, "kv_indptr [*] int32; kv_indices_ptr [*] index")
    lengths, slots = value_of(given["page_kernel_lens_ptr"]), given["kv_indices_ptr"]
    slots = slots if lengths is None else slots[: int(lengths.sum())]
    call.moved(slots, slots)


def _attend_rows(call: Call, given: Given) -> None:
    """megatron_rl/kernels/split_attention/triton.py. Slots of all requests are one table."""
    call.check_all(given, "q [T H D] bfloat16 (* D 1); k [S G D] =q; v [S G D] =q; query_starts [*] int64; slots [* *] int32 (* 1)")
    call.sizes["B"] = len(given["query_starts"]) - 1
    call.check_all(given, "key_counts [B] index; rows [B] index")
    call.require(call.sizes["H"] == call.sizes["G"] * given["GROUP"], f"groups of {given['GROUP']}")
    new, keys = value_of(given["query_starts"]), value_of(given["key_counts"])
    tokens, lengths = call.sizes["T"], torch.ones(call.sizes["B"], dtype=torch.int64) if keys is None else keys.long()
    taken = torch.full_like(lengths, tokens // max(len(lengths), 1)) if new is None else new.diff().long()
    pairs = int((taken * lengths).sum()) - int((taken * (taken - 1)).sum()) // 2
    read = torch.empty(int(lengths.sum()), call.sizes["G"], 2 * call.sizes["D"], dtype=given["k"].dtype, device="meta")
    call.multiplied("bf16", 4 * pairs * call.sizes["H"] * call.sizes["D"], given["q"], read, given["out"])


KERNELS: dict[str, Kernel | Callable[[Call, Given], None]] = {
    "_fwd_kernel": _extend,
    "_fwd_kernel_stage1": _decode,
    "_fwd_grouped_kernel_stage1": _decode,
    "_fwd_kernel_stage2": _join,
    "attend_rows": _attend_rows,
    "merge_splits": Kernel("partial [T H P D] float32; statistics [2 T H P] float32; out [T H D] bfloat16", "partial statistics out"),
    "create_flashinfer_kv_indices_triton": _list_slots,
    "get_num_kv_splits_triton": Kernel("num_kv_splits_ptr [B] int32; seq_lens_ptr [*] index", "num_kv_splits_ptr seq_lens_ptr"),
}
