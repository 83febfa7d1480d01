"""Qwen3-Next: gated delta nets, with gated attention in some layers, usually every fourth; experts chosen by a softmax beside one gated
shared expert. Norms are zero-centered. Qwen3.5 and 3.6 differ in the checkpoint's projections, and have a dense variant."""

from typing import Any

from parallel import mtp_layers
from parallel.attention import AttentionKind, GatedDeltaNet, SoftmaxAttention
from parallel.families.qwen3_moe import read_experts
from parallel.hf_config import CORRECT, MOST_LAYERS, HFConfig, refuse
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError

list_layer, list_mtp_layer = pre_norm_layer, mtp_layers.list_qwen_mtp_layer
ARCHITECTURE = "Qwen3NextForCausalLM"
_LINEAR, _FULL = "linear_attention", "full_attention"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(decoder_sparse_step=1, num_experts_per_tok=10, norm_topk_prob=True)  # as in transformers
    return read_hybrid(config, grouped=True, experts=read_experts(config))


def read_hybrid(config: HFConfig, grouped: bool, **options: Any) -> ModelGeometry:
    """Read a model of gated delta nets and gated attention. `grouped`: see `GatedDeltaNet`. `options`: fields of `ModelGeometry`."""
    config.with_defaults(mtp_num_hidden_layers=1).require(
        hidden_act="silu", attention_bias=False, attn_output_gate=True, mamba_ssm_dtype="float32", mtp_use_dedicated_embeddings=False
    )
    if (gate := config.get("output_gate_type")) not in (None, "swish", "silu"):
        raise refuse("output_gate_type", gate, "swish")
    return ModelGeometry(
        **config.widths(),
        attention=_read_layers(config, grouped),
        zero_centered_norms=True,
        mtp_layers=config.size("mtp_num_hidden_layers", least=0, most=MOST_LAYERS),
        **options,
    )


def _read_layers(config: HFConfig, grouped: bool) -> tuple[AttentionKind, ...]:
    """Read the attention of each layer from `layer_types`, in any order, or from `full_attention_interval`."""
    layers, types = config.layers(), config.get("layer_types")
    field = "full_attention_interval" if types is None else "layer_types"
    if types is None:
        config.with_defaults(full_attention_interval=4)
    elif not isinstance(types, list) or len(types) != layers or any(each not in (_LINEAR, _FULL) for each in types):
        raise GeometryError(f"config.json {field}", types, f"must name {_LINEAR} or {_FULL} for each of {layers} layers", CORRECT)
    elif _FULL in types and types == _repeat(interval := types.index(_FULL) + 1, layers):
        config.with_defaults(full_attention_interval=interval)  # SGLang by itself reads no other field
    if types is None or config.get("full_attention_interval") is not None:
        repeated = _repeat(interval := config.size("full_attention_interval"), layers)
        if types not in (None, repeated):
            rule = f"differs from full_attention_interval = {interval}, which means {_FULL} in every layer number that it divides"
            raise GeometryError(f"config.json {field}", types, rule, "remove one of them")
        types = repeated
    if _FULL not in types:
        rule = f"leaves no full attention in {layers} layers, which SGLang's caches need"
        raise GeometryError(f"config.json {field}", config.get(field), rule, CORRECT)
    kinds: dict[str, AttentionKind] = {_LINEAR: _read_delta_net(config, grouped), _FULL: _read_attention(config)}
    return tuple(kinds[each] for each in types)


def _repeat(interval: int, layers: int) -> list[str]:
    return [_LINEAR if (layer + 1) % interval else _FULL for layer in range(layers)]


def _read_attention(config: HFConfig) -> SoftmaxAttention:
    rope = config.rope("yarn", share=0.25, any_share=True, of_images=("mrope_section", "mrope_interleaved"))
    return SoftmaxAttention(*config.head_counts(), config.size("head_dim"), qk_norm=True, gated=True, rope=rope)


def _read_delta_net(config: HFConfig, grouped: bool) -> GatedDeltaNet:
    k_heads, v_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    if v_heads % k_heads:
        rule = f"must be a multiple of linear_num_key_heads ({k_heads})"
        raise GeometryError("config.json linear_num_value_heads", v_heads, rule, CORRECT)
    return GatedDeltaNet(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=config.size("linear_key_head_dim"),
        v_dim=config.size("linear_value_head_dim"),
        taps=config.size("linear_conv_kernel_dim"),
        grouped=grouped,
    )
