"""TODO."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from megatron_rl.kernels import batch_invariant
from megatron_rl.mcore.passes.packed_sequences import attend_packed
from megatron_rl.precision import kv_cache


class CoreAttention(MegatronModule):
    """Causal attention with grouped-query heads; `value` may be narrower. On a GPU torch's fused operator, on a CPU the engine's own.

    Packed sequences (micro-batches): [t, heads, d] with `packed_seq_params` from `packed_sequences.make_packed_params`; returns
    [t, heads * d]. A context-parallel rank passes its own positions of the row.
    A batch: [s, b, heads, d], padded at the end, which the causal mask hides; returns [s, b, heads * d].
    With `quantizes_kv` keys and values are those that an engine reads from an E4M3 cache. Where that has fixed scales, they are in
    `kv_scales`, float32 [2]: of keys and of values (`mcore.weights.cache_scales`).
    """

    kv_scales: torch.Tensor | None
    kv_amax: torch.Tensor | None = None
    """float32 [2]: the largest magnitudes of keys and of values, while somebody collects them."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.quantizes_kv, self.layer_number = config.quantize_kv, layer_number
        self.register_buffer("kv_scales", torch.ones(2) if config.scale_kv_by_layer else None)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any) -> torch.Tensor:
        packed = options.get("packed_seq_params")
        if self.kv_amax is not None:
            seen = torch.stack([x.detach().abs().amax() for x in (key, value)])
            torch.maximum(self.kv_amax, seen.float(), out=self.kv_amax)
        if self.quantizes_kv:
            key, value = self.pass_through_cache(key, value)
        if packed is not None:
            return attend_packed(query, key, value, packed, self.softmax_scale).flatten(1)
        if self.config.context_parallel_size > 1:
            raise NotImplementedError("context parallelism takes packed sequences only")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, h, d] -> [b, h, s, d]
        if q.is_cuda:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
        else:
            out = batch_invariant.causal_attention(q, k, v, self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)

    def pass_through_cache(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as an E4M3 cache gives them back."""
        if self.kv_scales is not None:
            key_scale, value_scale = self.kv_scales.unbind()
            return kv_cache.round_trip_with_scale(key, key_scale), kv_cache.round_trip_with_scale(value, value_scale)
        return kv_cache.round_trip(key), kv_cache.round_trip(value)


class AbsorbedCoreAttention(CoreAttention):
    """Attention between latents, then for every head the product with its part V [h, v, rank] of kv_b, which comes in the place of
    `value`: of packed sequences [t, h, rank + rope] and [t, 1, rank + rope] -> [t, h * v]."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any) -> torch.Tensor:
        heads, _, rank = value.shape
        attended = super().forward(query, key, key[..., :rank], attention_mask, **options)
        return batch_invariant.multiply_heads(attended.unflatten(-1, (heads, rank)), value).flatten(-2)

    def pass_through_cache(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache holds latents and rotated positions, with a scale for each; keys are both, values the latents."""
        latents = kv_cache.round_trip(value)
        return torch.cat([latents, kv_cache.round_trip(key[..., value.shape[-1] :])], -1), latents
