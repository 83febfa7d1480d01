"""Megatron's self attention. On a GPU, one kernel splits, normalizes and rotates packed queries and keys (`kernels.heads`).

Megatron's rotation would wait for the device four times per layer to read sequence lengths that the host knows. Ranks that share a
key-value head exchange only what they need (`shared_heads`); Megatron would gather all heads on every rank.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron_rl.kernels.heads import Heads, Norms
from megatron_rl.kernels.heads.reference import can_rotate, split_heads
from megatron_rl.kernels.rope import reference as rope
from megatron_rl.mcore.layers.attention.shared_heads import exchange_heads
from megatron_rl.mcore.layers.norms import RMSNorm
from megatron_rl.mcore.passes.two_batch import PerMicroBatch


class PackedSelfAttention(SelfAttention):
    """Self attention for packed rows and batches, on any device."""

    _rotation = PerMicroBatch()  # rotation of the current forward pass, if this class rotates instead of Megatron

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of Megatron's layer. On a GPU, packed rows are rotated here."""
        if packed_seq_params is not None and rotary_pos_emb is not None and rope.rotates_rows(hidden_states):
            angles, interleaved = rotary_pos_emb[:, 0, 0], self.config.rotary_interleaved  # Megatron's angles are repeated twice
            once = angles[:, ::2] if interleaved else angles[:, : angles.shape[1] // 2]
            self._rotation = packed_seq_params.make_rotation(once, interleaved)
            rotary_pos_emb = None
        try:
            return super().forward(
                hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **options
            )
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, hidden_states: Any, *args: Any, **options: Any) -> Any:
        """Return query [t, 1, heads, d], key and value [t, 1, groups, d]; query and key are rotated if this class rotates."""
        shares_heads = self.config.num_query_groups < self.world_size
        if self._rotation is not None and self._fuses(self._rotation):
            mixed = self._project_shared_heads(hidden_states) if shares_heads else self.linear_qkv(hidden_states)[0]
            return tuple(part.unsqueeze(1) for part in self._split(mixed.squeeze(1), self._rotation))
        if shares_heads:
            query, key, *others = self._split_shared_heads(hidden_states)
        else:
            query, key, *others = super().get_query_key_value_tensors(hidden_states, *args, **options)
        if self._rotation is None:
            return query, key, *others
        query, key = (self._rotation.rotate(x.squeeze(1)).unsqueeze(1) for x in (query, key))
        return query, key, *others

    def _fuses(self, rotation: rope.Rotation) -> bool:
        """Return whether one kernel can produce queries and keys, which requires that no hook observes the norms."""
        norms = [norm for norm in (self.q_layernorm, self.k_layernorm) if isinstance(norm, RMSNorm)]
        return can_rotate(rotation, self.hidden_size_per_attention_head) and not any(norm._forward_hooks for norm in norms)

    def _split(self, mixed: torch.Tensor, rotation: rope.Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated query [t, heads, d], rotated key and value [t, groups, d] of [t, width]."""
        norms: Norms = None
        if isinstance(self.q_layernorm, RMSNorm):
            norms = self.q_layernorm(None), self.k_layernorm(None)
        groups = max(1, self.config.num_query_groups // self.world_size)
        queries = self.config.num_attention_heads // self.world_size // groups
        return split_heads(mixed, Heads(groups, queries, rotation, self.config.layernorm_epsilon), norms)

    def _project_shared_heads(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return queries, key and value [s, b, (heads + 2) d] of a rank that shares its key-value head with other ranks."""
        dim, ranks = self.hidden_size_per_attention_head, self.world_size // self.config.num_query_groups
        mixed, _ = self.linear_qkv(hidden_states)
        return exchange_heads(mixed, self.config.num_attention_heads // self.config.num_query_groups, dim, ranks, self.pg_collection.tp)

    def _split_shared_heads(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [s, b, heads, d], key and value [s, b, 1, d] of a rank that shares its key-value head."""
        dim, heads = self.hidden_size_per_attention_head, self._project_shared_heads(hidden_states)
        query, key, value = heads.unflatten(-1, (-1, dim)).split([heads.shape[-1] // dim - 2, 1, 1], 2)
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        return query, key if self.k_layernorm is None else self.k_layernorm(key), value
