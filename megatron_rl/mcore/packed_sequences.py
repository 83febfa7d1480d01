"""What Megatron is told of sequences packed into one row, [1, t]: its `thd` format.

Queries, keys and values are [t, heads, d] then, rotary positions start anew with every sequence, and the core attention gets this
description; Transformer Engine's takes the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.mcore.context_parallel import ContextShard
from megatron_rl.precision.ops import packed_attention


@dataclass
class PackedRowParams(PackedSeqParams):
    """Megatron's description, and what attention without `cu_seqlens` takes in its place."""

    lengths: list[int] = field(default_factory=list)
    """Places of each sequence."""
    groups: list[packed_attention.LengthGroup] = field(default_factory=list)
    """On a CPU: which sequences attend in one batch."""
    shard: ContextShard | None = None
    """This context parallel rank's places of the row."""


def make_packed_params(lengths: list[int], shard: ContextShard) -> PackedRowParams:
    """Sequences of `lengths` places, one after the other; they fill the row."""
    device = shard.own_positions.device
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
    groups = packed_attention.group_by_length(lengths) if device.type == "cpu" else []
    longest = max(lengths)  # exactly: a table of t rotary positions Megatron takes for one that does not start anew
    return PackedRowParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, lengths=lengths, groups=groups, shard=shard)


def attend_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRowParams, scale: float | None) -> torch.Tensor:
    """`packed_attention` of the whole row, of which a context parallel rank has and gets its own places."""
    shard = row.shard
    if shard is None or shard.size == 1:
        return _attend(query, key, value, row, scale)
    query, key, value = (shard.to_heads(x) for x in (query, shard.repeat_heads(key), shard.repeat_heads(value)))
    return shard.to_positions(_attend(query, key, value, row, scale))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRowParams, scale: float | None) -> torch.Tensor:
    """With what the device has: on a CPU the engine's own operator, on a GPU FlashAttention, which knows no FP32."""
    if not query.is_cuda:
        return packed_attention.grouped_attention(query, key, value, row.groups, scale)
    if query.dtype is torch.float32:
        return packed_attention.sdpa_per_sequence(query, key, value, row.lengths, scale)
    return packed_attention.flash_attention(query, key, value, row.cu_seqlens_q, row.max_seqlen_q, scale)
