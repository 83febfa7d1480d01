"""Core attention: softmax over keys, weighted sum of values, and the emulation of an E4M3 KV cache."""

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.kernels import batch_invariant
from megatron_rl.mcore.base.weight_gradient import take_weight
from megatron_rl.precision import kv_cache


class CoreAttention(MegatronModule):
    """Causal attention of packed sequences with grouped-query heads (`PackedRowParams.attend`): [t, heads, d] with `packed_seq_params`
    from `make_packed_params` -> [t, heads * d]. A context-parallel rank passes its own positions of the row.

    With `quantizes_kv`, keys and values are rounded like in the engine's E4M3 cache, by the fixed scales `kv_scales` (float32 [2], keys and
    values) if there are any (`mcore.weights.cache_scales`).
    """

    kv_scales: torch.Tensor | None
    softmax_offset: torch.nn.Parameter | None  # [heads] of this rank: sinks
    window = 0  # number of keys that a token attends to; 0: all
    kv_amax: torch.Tensor | None = None  # float32 [2]: largest magnitudes of keys and values, while they are being collected

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale, self.quantizes_kv, self.layer_number = softmax_scale, config.quantize_kv, layer_number
        self.register_parameter("softmax_offset", None)
        self.register_buffer("kv_scales", torch.ones(2) if config.scale_kv_by_layer else None)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any) -> torch.Tensor:
        if self.kv_amax is not None:
            seen = torch.stack([x.detach().abs().amax() for x in (key, value)])
            torch.maximum(self.kv_amax, seen.float(), out=self.kv_amax)
        if self.quantizes_kv:
            key, value = self.pass_through_cache(key, value)
        row, sinks = options["packed_seq_params"], take_weight(self.softmax_offset)
        shared = self.config.shared_attention
        return row.attend(query, key, value, self.softmax_scale, sinks, self.window, shared).flatten(1)

    def pass_through_cache(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as read back from an E4M3 cache."""
        if self.kv_scales is not None:
            key_scale, value_scale = self.kv_scales.unbind()
            return kv_cache.round_trip_with_scale(key, key_scale), kv_cache.round_trip_with_scale(value, value_scale)
        return kv_cache.round_trip(key), kv_cache.round_trip(value)


class SinkCoreAttention(CoreAttention):
    """The same with sinks, under Megatron's name for them, and maybe a window. CPU only."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **options: Any) -> None:
        super().__init__(config, layer_number, *args, **options)
        kind = config.attention[layer_number - 1]
        self.window = kind.window
        heads = kind.heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict | None = None) -> Any:
        """Return Megatron's description of the state, in which ranks have their own sinks."""
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets)


class AbsorbedCoreAttention(CoreAttention):
    """Attention over latents, followed by each head's product with its part V [h, v, rank] of kv_b, which is passed as `value`:
    [t, h, rank + rope] and [t, 1, rank + rope] -> [t, h * v]."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any) -> torch.Tensor:
        heads, _, rank = value.shape
        attended = super().forward(query, key, key[..., :rank], attention_mask, **options)
        return batch_invariant.multiply_heads(attended.unflatten(-1, (heads, rank)), value).flatten(-2)

    def pass_through_cache(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys are latents and rotated positions, values are the latents. The cache holds both parts with a scale for each."""
        latents = kv_cache.round_trip(value)
        return torch.cat([latents, kv_cache.round_trip(key[..., value.shape[-1] :])], -1), latents
