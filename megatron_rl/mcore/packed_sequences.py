"""What Megatron is told of sequences packed into one row, [1, t]: its `thd` format.

Queries, keys and values are [t, heads, d] then, rotary positions start anew with every sequence, and the core attention gets this
description; Transformer Engine's takes the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.mcore.context_parallel import Share
from megatron_rl.precision.ops import packed_attention


@dataclass
class Packed(PackedSeqParams):
    """Megatron's description, and what attention without `cu_seqlens` takes in its place."""

    lengths: list[int] = field(default_factory=list)
    """Places of each sequence."""
    groups: list[packed_attention.Alike] = field(default_factory=list)
    """On a CPU: which sequences attend in one batch."""
    share: Share | None = None
    """This context parallel rank's places of the row."""


def packed(lengths: list[int], share: Share) -> Packed:
    """Sequences of `lengths` places, one after the other; they fill the row."""
    device = share.own.device
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
    groups = packed_attention.alike(lengths) if device.type == "cpu" else []
    longest = max(lengths)  # exactly: a table of t rotary positions Megatron takes for one that does not start anew
    return Packed("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, lengths=lengths, groups=groups, share=share)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Packed, scale: float | None) -> torch.Tensor:
    """`packed_attention` of the whole row, of which a context parallel rank has and gets its own places."""
    share = row.share
    if share is None or share.size == 1:
        return _attend(query, key, value, row, scale)
    query, key, value = (share.to_heads(x) for x in (query, share.enough_heads(key), share.enough_heads(value)))
    return share.to_places(_attend(query, key, value, row, scale))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Packed, scale: float | None) -> torch.Tensor:
    """With what the device has: on a CPU the engine's own operator, on a GPU FlashAttention, which knows no FP32."""
    if not query.is_cuda:
        return packed_attention.row_by_row(query, key, value, row.groups, scale)
    if query.dtype is torch.float32:
        return packed_attention.one_by_one(query, key, value, row.lengths, scale)
    return packed_attention.flash(query, key, value, row.cu_seqlens_q, row.max_seqlen_q, scale)
