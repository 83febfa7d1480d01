"""Multi-latent attention (DeepSeek-V3) with down projections replicated on every tensor-parallel rank.

Megatron's local spec would split them by rows, through FP8 blocks; its Transformer Engine spec replicates them too. Let K and V be a
head's parts of kv_b's weight, q a query, c latents and r positions (DeepSeek-V2, arXiv 2405.04434, section 2.1):

    expanded   score = q . (K c) + q_r . r       y = sum over keys of  p (V c)
    absorbed   score = (K^T q) . c + q_r . r     y = V (sum over keys of  p c)

The trainer uses the engine's form. On a CPU, the engine uses the absorbed form. On a GPU, SGLang expands prompts; the absorbed form would
cost the trainer 3.4 times the attention FLOPs (head dimensions 576 and 512 instead of 192 and 128), and FlashAttention ends at 256.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

from megatron_rl.kernels.batch_invariant import multiply_heads
from megatron_rl.kernels.rope.reference import rotates_rows
from parallel.attention.latent import LATENT_NORM_EPS


def takes_absorbed_form() -> bool:
    """Return whether attention uses the absorbed form, as this machine's engine does."""
    return not torch.cuda.is_available()


class LatentAttention(MLASelfAttention):
    """Megatron's MLA. Its constructor accepts only Megatron's classes as down projections, so they are replaced afterwards."""

    def __init__(self, config: Any, submodules: MLASelfAttentionSubmodules, *args: Any, **kwargs: Any) -> None:
        plain = replace(submodules, linear_q_down_proj=ColumnParallelLinear, linear_kv_down_proj=ColumnParallelLinear)
        super().__init__(config, plain, *args, **kwargs)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(self, name):  # queries may be projected directly
                built = getattr(self, name)
                setattr(self, name, getattr(submodules, name)(built.input_size, built.output_size, config=config))
        for norm in (getattr(self, name, None) for name in ("q_layernorm", "kv_layernorm")):
            if norm is not None:
                norm.eps = LATENT_NORM_EPS

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the submodules as they are. Megatron refuses norms unless `qk_layernorm` is set, which means norms of heads here."""
        return vars(submodules)

    def _run_core_attention(self, *args: Any, **options: Any) -> torch.Tensor:
        """Run attention on values as they are. Megatron pads those of packed rows to the width of queries."""
        return self.core_attention(*args, **options)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: Any = None, position_ids: Any = None, packed_seq_params: Any = None, **kw: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Return queries and keys [t, h, nope + rope] and values [t, h, v]. On a GPU, packed rows are rotated without waiting for the
        device."""
        if not rotates_rows(hidden_states):
            return super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids, packed_seq_params, **kw)
        return self.expand(hidden_states, self._make_rotation(hidden_states, packed_seq_params))

    def expand(self, hidden_states: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the expanded form of a packed row [t / tp, 1, hidden]. Rotated values are interleaved in pairs, as in the engine."""
        config, heads = self.config, self.num_attention_heads_per_partition
        q = self._project_queries(hidden_states).squeeze(1).unflatten(-1, (heads, -1))
        nope, rope = self.linear_kv_down_proj(hidden_states)[0].split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        kv = self.linear_kv_up_proj(self.kv_layernorm(nope))[0].squeeze(1).unflatten(-1, (heads, -1))
        k_nope, value = kv.split([config.qk_head_dim, config.v_head_dim], -1)
        k_rope = rotate(self._share(rope)).expand(-1, heads, -1)
        q_nope, q_rope = q.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        query, key = torch.cat([q_nope, rotate(q_rope)], -1), torch.cat([k_nope, k_rope], -1)
        return query, key, value.contiguous(), None, None

    def _share(self, x: torch.Tensor) -> torch.Tensor:
        """Return [s, ...] of [s / tp, ...] for the heads of every rank. The gradients of all ranks' heads are summed."""
        share = gather_from_sequence_parallel_region if self.config.sequence_parallel else copy_to_tensor_model_parallel_region
        return share(x, group=self.tp_group)

    def _project_queries(self, x: torch.Tensor) -> torch.Tensor:
        """Project [s / tp, b, hidden] to [s, b, heads * d] of this rank's heads."""
        if self.config.q_lora_rank is None:
            return self.linear_q_proj(x)[0]
        return self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x)[0]))[0]

    def _make_rotation(self, hidden_states: torch.Tensor, row: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the rotary embedding of this micro-batch. It leaves rotated values interleaved in pairs."""
        if row.rotation is not None:
            return row.rotation.rotate
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, self.config, row)
        angles = self.rotary_pos_emb(length, packed_seq=True)
        angles, mscale = angles if self.config.rope_type == "yarn" else (angles, 1.0)
        rounded_to = None if rotates_rows(hidden_states) else self.config.params_dtype
        once = angles[:, 0, 0, : angles.shape[-1] // 2]  # Megatron's angles are repeated twice
        return row.make_rotation(once, True, mscale, rounded_to).rotate


class AbsorbedLatentAttention(LatentAttention):
    """The absorbed form: every head attends to one shared head of latents and rotated positions."""

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: Any = None, position_ids: Any = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Return queries [t, h, rank + rope], latents [t, 1, rank + rope] and, instead of values, V [h, v, rank]."""
        config, heads = self.config, self.num_attention_heads_per_partition
        q, latents = self._project_queries(hidden_states).squeeze(1).unflatten(-1, (heads, -1)), self._project_latents(hidden_states)
        rotate = self._make_rotation(hidden_states, packed_seq_params)
        q_nope, q_rope = q.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        k_nope, k_rope = latents.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        kv_b = self.linear_kv_up_proj(hidden_states.dtype).unflatten(0, (heads, -1))
        key_part, value_part = kv_b.split([config.qk_head_dim, config.v_head_dim], 1)
        query = torch.cat([multiply_heads(q_nope, key_part.transpose(1, 2)), rotate(q_rope)], -1)
        return query, torch.cat([k_nope, rotate(k_rope)], -1), value_part, None, None

    def _project_latents(self, x: torch.Tensor) -> torch.Tensor:
        """Project [t / tp, 1, hidden] to [t, 1, rank + rope] on every rank. The gradients of all ranks' heads are summed."""
        nope, rope = self.linear_kv_down_proj(x)[0].split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], -1)
        return self._share(torch.cat([self.kv_layernorm(nope), rope], -1))
