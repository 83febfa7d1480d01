"""Megatron's self attention. On a GPU, one kernel splits, normalizes and rotates packed queries and keys (`kernels.heads`).

Megatron's rotation would wait for the device four times per layer to read sequence lengths that the host knows.

With more tensor-parallel ranks than key-value heads, Megatron splits the rows of a head group (its queries, key and value) into equal
parts for the ranks that share it:

    q1 q2 q3 | q4 k v       two ranks; the first needs q1 q2 k v, the second q3 q4 k v

Megatron's layer would gather all heads on every rank. Here a rank sends only to the ranks of its group, and only what they need. In the
backward pass, gradients travel back and are added in FP32, in rank order. If a gate multiplies each head's output, the gates of a group
follow its queries, and a rank needs those of its own queries.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention

from megatron_rl.kernels.gates.reference import gate
from megatron_rl.kernels.heads import Heads, Norms
from megatron_rl.kernels.heads.reference import can_rotate, split_heads
from megatron_rl.kernels.rope import reference as rope
from megatron_rl.mcore.base.two_batch import PerMicroBatch
from megatron_rl.mcore.layers.linear.norms import RMSNorm
from parallel.attention import AttentionKind


class PackedSelfAttention(SelfAttention):
    """Self attention for packed rows, on any device."""

    _rotation = PerMicroBatch()  # rotation of the current forward pass

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        """Return the output of Megatron's layer. Packed rows are rotated here, unless the layer has no positions."""
        if not self.rotates:
            return super().forward(hidden_states, attention_mask, *args, **options | {"rotary_pos_emb": None})
        row, repeated = options["packed_seq_params"], options["rotary_pos_emb"]
        angles, interleaved = repeated[:, 0, 0], self.config.rotary_interleaved  # Megatron's angles are repeated twice
        once = angles[:, ::2] if interleaved else angles[:, : angles.shape[1] // 2]
        rounded_to = None if rope.rotates_rows(hidden_states) else self.config.params_dtype
        scale = self._yarn_concentration_factor * self.config.yarn_attn_factor
        self._rotation = row.make_rotation(once, interleaved, scale, rounded_to)
        options["rotary_pos_emb"] = None
        try:
            return super().forward(hidden_states, attention_mask, *args, **options)
        finally:
            self._rotation = None

    @property
    def rotates(self) -> bool:
        kinds: tuple[AttentionKind, ...] = self.config.attention
        return kinds[min(self.layer_number, len(kinds)) - 1].rope is not None  # MTP layers follow the others

    def get_query_key_value_tensors(self, hidden_states: Any, *args: Any, **options: Any) -> Any:
        """Return query [t, 1, heads, d], key and value [t, 1, groups, d], and if outputs are gated the gate [t, 1, heads, d]; query and key
        are rotated if this class rotates."""
        shares_heads = self.config.num_query_groups < self.world_size
        if self._rotation is not None and self._fuses(self._rotation):
            mixed = self._project_shared_heads(hidden_states) if shares_heads else self.linear_qkv(hidden_states)[0]
            return tuple(part.unsqueeze(1) for part in self._split(mixed.squeeze(1), self._rotation))
        if shares_heads:
            heads = self._project_shared_heads(hidden_states).unflatten(-1, (-1, self.hidden_size_per_attention_head))
            queries = self.config.num_attention_heads // self.world_size
            query, *others, key, value = heads.split([queries, *[queries] * self._is_gated, 1, 1], 2)
            query = query if self.q_layernorm is None else self.q_layernorm(query)
            key, others = key if self.k_layernorm is None else self.k_layernorm(key), [value, *others]
        else:
            query, key, *others = super().get_query_key_value_tensors(hidden_states, *args, **options)
        if self._rotation is None:
            return query, key, *others
        query, key = (self._rotation.rotate(x.squeeze(1)).unsqueeze(1) for x in (query, key))
        return query, key, *others

    def _apply_output_gate(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return x [t, 1, heads * d] times the sigmoid of its gate. The bits of Megatron's sigmoid depend on the number of elements."""
        return gate(x, gates.reshape(x.shape))

    @property
    def _is_gated(self) -> bool:
        return self.config.attention_output_gate

    def _fuses(self, rotation: rope.Rotation | rope.RoundedRotation) -> bool:
        """Return whether one kernel can produce queries and keys, which requires that no hook observes the norms. The kernel knows no
        gates, and no norms over all heads."""
        norms = [norm for norm in (self.q_layernorm, self.k_layernorm) if isinstance(norm, RMSNorm)]
        whole = isinstance(rotation, rope.Rotation) and can_rotate(rotation, self.hidden_size_per_attention_head)
        by_head = not self._is_gated and not self.config.norms_all_heads
        return whole and by_head and not any(norm._forward_hooks for norm in norms)

    def _split(self, mixed: torch.Tensor, rotation: rope.Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated query [t, heads, d], rotated key and value [t, groups, d] of [t, width]."""
        norms: Norms = None
        if isinstance(self.q_layernorm, RMSNorm):
            norms = self.q_layernorm(None), self.k_layernorm(None)
        groups = max(1, self.config.num_query_groups // self.world_size)
        queries = self.config.num_attention_heads // self.world_size // groups
        return split_heads(mixed, Heads(groups, queries, rotation, self.config.layernorm_epsilon), norms)

    def _project_shared_heads(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return queries, gates if there are any, key and value [s, b, (heads + 2) d] of a rank that shares its key-value head with other
        ranks."""
        dim, groups = self.hidden_size_per_attention_head, self.config.num_query_groups
        mixed, _ = self.linear_qkv(hidden_states)
        shared = [self.config.num_attention_heads // groups] * (1 + self._is_gated)
        return exchange_heads(mixed, shared, dim, self.world_size // groups, self.pg_collection.tp)


def exchange_heads(mixed: torch.Tensor, shared: Sequence[int], dim: int, ranks: int, group: Any) -> torch.Tensor:
    """Return this rank's part of its head group, [..., (shared / ranks + 2) * dim] in the order of the group, with gradient.

    Args:
        mixed: [..., (shared + 2) * dim / ranks], this rank's part of the group.
        shared: numbers of heads of `dim` that the ranks share equally: queries, and gates if there are any. A key head and a value head
            follow, which each rank needs whole.
        ranks: number of consecutive ranks of `group` that share the head group.
    """
    return _HeadExchange.apply(mixed, _HeadCut(shared, dim, ranks, group.rank() % ranks), group)


class _HeadCut:
    """Which columns of a head group each rank sends to each other rank that shares it. `own` is this rank's index among them."""

    def __init__(self, shared: Sequence[int], dim: int, ranks: int, own: int) -> None:
        self.ranks, self.own, self.width = ranks, own, (sum(shared) + 2) * dim // ranks
        self._edges = [heads * dim for heads in accumulate(shared, initial=0)]  # of what ranks share
        self._end = self._edges[-1] + 2 * dim

    def columns(self, sender: int, receiver: int) -> list[slice]:
        """Return the columns of the sender's part that the receiver needs, in ascending order."""
        start, end = sender * self.width, (sender + 1) * self.width
        parts = [(first, (last - first) // self.ranks) for first, last in pairwise(self._edges)]
        needed = [*((first + receiver * size, first + (receiver + 1) * size) for first, size in parts), (self._edges[-1], self._end)]
        overlaps = ((max(first, start) - start, min(last, end) - start) for first, last in needed)
        return [slice(first, last) for first, last in overlaps if first < last]

    def count(self, sender: int, receiver: int) -> int:
        return sum(part.stop - part.start for part in self.columns(sender, receiver))


class _HeadExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, cut: _HeadCut, group: Any) -> torch.Tensor:
        ctx.cut, ctx.group = cut, group
        rows, everyone = mixed.flatten(0, -2), range(cut.ranks)
        parts = [torch.cat([rows[:, part] for part in cut.columns(cut.own, to)] or [rows[:, :0]], -1) for to in everyone]
        received = _swap(parts, [cut.count(source, cut.own) for source in everyone], cut, group)
        return torch.cat(received, -1).unflatten(0, mixed.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cut, rows, everyone = ctx.cut, gradient.flatten(0, -2), range(ctx.cut.ranks)
        parts = list(rows.split([cut.count(source, cut.own) for source in everyone], -1))
        received = _swap(parts, [cut.count(cut.own, to) for to in everyone], cut, ctx.group)
        addends = defaultdict(list)
        for to, part in enumerate(received):
            columns = cut.columns(cut.own, to)  # `part` has them one after the other
            for column, addend in zip(columns, part.split([each.stop - each.start for each in columns], -1), strict=True):
                addends[column.start, column.stop].append(addend)
        total = rows.new_empty(len(rows), cut.width)
        for (start, stop), parts in addends.items():
            _add(parts, total[:, start:stop])
        return total.unflatten(0, gradient.shape[:-1]), None, None


def _add(parts: list[torch.Tensor], result: torch.Tensor) -> None:
    """Write the sum of parts of one shape, added to 0 in FP32 in list order and rounded. A query's gradient has a single part."""
    if len(parts) == 1:
        torch.add(parts[0], 0.0, out=result)
        return
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part
    result.copy_(total)


def _swap(parts: list[torch.Tensor], widths: list[int], cut: _HeadCut, group: Any) -> list[torch.Tensor]:
    """Send `parts` [t, any] to the ranks that share heads; return their parts [t, width]. This rank's own part is kept."""
    first, rows = group.rank() - cut.own, len(parts[cut.own])
    sizes, splits = [0] * group.size(), [0] * group.size()
    for number in range(cut.ranks):
        if number != cut.own:
            sizes[first + number], splits[first + number] = rows * widths[number], parts[number].numel()
    sent = torch.cat([part.flatten() for number, part in enumerate(parts) if number != cut.own])
    flat = sent.new_empty(sum(sizes))
    dist.all_to_all_single(flat, sent, sizes, splits, group=group)
    pieces = flat.split(sizes)[first : first + cut.ranks]
    return [parts[cut.own] if number == cut.own else piece.view(rows, widths[number]) for number, piece in enumerate(pieces)]
