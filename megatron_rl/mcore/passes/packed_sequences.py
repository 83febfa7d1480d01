"""Megatron's parameters for sequences packed into one row [1, t]: its `thd` format. Nothing here waits for the device."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.kernels.attention import flash3
from megatron_rl.kernels.attention import reference as packed_attention
from megatron_rl.kernels.device_copy import copy_to_device
from megatron_rl.kernels.rope.reference import Rotation, RoundedRotation
from megatron_rl.kernels.split_attention import reference as split_attention
from megatron_rl.mcore.passes.context_parallel import ContextShard


@dataclass
class PackedRowParams(PackedSeqParams):
    """Megatron's parameters, plus those that our attention needs."""

    lengths: list[int] = field(default_factory=list)  # number of positions of each sequence
    groups: list[packed_attention.LengthGroup] = field(default_factory=list)  # sequences that attend in one batch; on a CPU only
    shard: ContextShard | None = None  # this context-parallel rank's positions of the row
    positions: torch.Tensor | None = None  # int64 [t / cp]: position of each token in its sequence
    rotation: Rotation | RoundedRotation | None = None  # rotation of queries and keys, created by the first layer that needs it

    def make_rotation(
        self, angles: torch.Tensor, interleaved: bool, scale: float = 1.0, rounded_to: torch.dtype | None = None
    ) -> Rotation | RoundedRotation:
        """Return the row's rotation by `angles`, float32 [positions, pairs]; a `RoundedRotation` if `rounded_to` is given."""
        if self.rotation is None:
            assert self.positions is not None
            given = angles, self.positions, interleaved, scale
            self.rotation = Rotation.from_angles(*given) if rounded_to is None else RoundedRotation.from_angles(*given, rounded_to)
        return self.rotation

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None,
        window: int,
        shared: str = "",
    ) -> torch.Tensor:
        """Return the attention of a whole row: by the engine's operator on a CPU or if `shared` names its backend; otherwise by
        FlashAttention, by torch's fused attention for FP32, which FlashAttention lacks, or in splits with sinks or a window. A
        context-parallel rank passes and receives its own positions. `sinks` are those of all heads of this rank, see
        `batch_invariant.attention`."""
        shard = self.shard
        if shard is not None and shard.size > 1:
            query, key, value = shard.to_heads(query, shard.repeat_heads(key), shard.repeat_heads(value))
            sinks = None if sinks is None else sinks.chunk(shard.size)[shard.group.rank()]
        if not query.is_cuda:
            out = packed_attention.grouped_attention(query, key, value, self.groups, scale, sinks, window)
        elif sinks is not None or window or shared == "triton":
            out = split_attention.attend_packed(query, key, value, self.cu_seqlens_q, self.max_seqlen_q, scale, sinks, window)
        elif shared:
            out = flash3.attend(query, key, value, self.cu_seqlens_q, self.max_seqlen_q, scale)
        elif query.dtype is torch.float32:
            out = packed_attention.sdpa_per_sequence(query, key, value, self.lengths, scale)
        else:
            out = packed_attention.flash_attention(query, key, value, self.cu_seqlens_q, self.max_seqlen_q, scale)
        return out if shard is None or shard.size == 1 else shard.to_positions(out)


def make_packed_params(lengths: list[int], shard: ContextShard, positions: torch.Tensor) -> PackedRowParams:
    """Return the parameters of a row of sequences of the given lengths. `positions` is this rank's part [1, t / cp] of the row's
    positions."""
    device = shard.own_positions.device
    starts = copy_to_device(torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32), device)
    groups = packed_attention.group_by_length(lengths) if device.type == "cpu" else []
    # exact: Megatron does not restart rotary positions if the table has t of them
    longest: dict[str, Any] = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(lengths))
    return PackedRowParams("thd", starts, starts, lengths=lengths, groups=groups, shard=shard, positions=positions[0], **longest)
