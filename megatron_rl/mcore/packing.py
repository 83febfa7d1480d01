"""Sequences packed into one row, [1, t]: what Megatron is told of them, and attention that stays within each.

Megatron's `thd` format: queries, keys and values are [t, heads, d], `cu_seqlens` says where sequences begin. Its rotary positions start
anew with every sequence, and Transformer Engine's attention takes the same description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention.varlen import varlen_attn

from megatron_rl import row_invariant


@dataclass
class Packed(PackedSeqParams):
    """Megatron's description, and what attention on a CPU needs to know beyond it."""

    lengths: list[int] = field(default_factory=list)
    """Places of each sequence."""
    groups: list[row_invariant.Alike] = field(default_factory=list)
    """On a CPU: which sequences attend in one batch."""


def packed(lengths: list[int], device: torch.device) -> Packed:
    """Sequences of `lengths` places, one after the other; they fill the row."""
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
    groups = row_invariant.alike(lengths) if device.type == "cpu" else []
    longest = max(lengths)  # exactly: Megatron takes a table of t positions for one that does not start anew
    return Packed("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, lengths=lengths, groups=groups)


def packed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Packed, scale: float | None) -> torch.Tensor:
    """Causal attention of each sequence to itself: query [t, h, d], key [t, g, d], value [t, g, e]; returns [t, h, e].

    On a CPU the engine's own operator. On a GPU FlashAttention by `cu_seqlens`, or torch's fused attention one sequence after the other
    in FP32, which FlashAttention does not know.
    """
    if not query.is_cuda:
        return row_invariant.packed_causal_attention(query, key, value, row.groups, scale)
    if query.dtype is torch.float32:
        return _one_by_one(query, key, value, row.lengths, scale)
    return _flash(query, key, value, row, scale)


def _one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float | None) -> torch.Tensor:
    parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (query, key, value)), strict=True)
    found = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True) for q, k, v in parts]
    return torch.cat(found, 1).transpose(0, 1)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Packed, scale: float | None) -> torch.Tensor:
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))  # it wants one width of all three
    found = varlen_attn(
        query,
        key,
        value,
        row.cu_seqlens_q,
        row.cu_seqlens_kv,
        row.max_seqlen_q,
        row.max_seqlen_kv,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found[..., :width]
