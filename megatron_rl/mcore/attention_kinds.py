"""Megatron's options for each kind of attention (`parallel.attention`), which a TransformerConfig has for all layers together."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from parallel.attention import AttentionKind, GatedDeltaNet, LatentAttention, SinkAttention, SoftmaxAttention
from parallel.model_geometry import ModelGeometry


def attention_options(geometry: ModelGeometry) -> dict[str, Any]:
    """Return the options of all kinds of attention that a model has."""
    options: dict[str, Any] = {}
    for kind in dict.fromkeys(geometry.attention):
        options |= _OPTIONS[type(kind)](kind)
    return options


def _softmax_options(kind: SoftmaxAttention) -> dict[str, Any]:
    yarn = kind.rope.yarn if kind.rope else None
    scale = ("rotary_scaling_factor", "mscale", "mscale_all_dim", "attn_factor") if yarn else ()
    return {
        "num_attention_heads": kind.heads,
        "num_query_groups": kind.kv_heads,
        "kv_channels": kind.head_dim,
        "add_qkv_bias": kind.qkv_bias,
        "qk_layernorm": kind.qk_norm,
        "norms_all_heads": kind.over_all_heads,
        "attention_output_gate": kind.gated,
        **({"rotary_interleaved": kind.rope.interleaved} if kind.rope else {}),
        **{f"yarn_{name}": getattr(yarn, name) for name in scale},
    }


def _latent_options(kind: LatentAttention) -> dict[str, Any]:
    """Return the options of multi-latent attention with its own rotary embedding. Without `qk_layernorm`, for which Megatron would sum
    gradients over tensor-parallel ranks."""
    options: dict[str, Any] = {
        "num_attention_heads": kind.heads,
        "multi_latent_attention": True,
        "q_lora_rank": kind.q_rank or None,
        "kv_lora_rank": kind.kv_rank,
        "qk_head_dim": kind.nope_dim,
        "qk_pos_emb_head_dim": kind.rope_dim,
        "v_head_dim": kind.v_dim,
        "rotary_base": kind.rope.theta,
    }
    if kind.rope.yarn is None:  # Megatron scales the softmax by the rotary scaling factor even without YaRN
        return {**options, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    yarn = {name: value for name, value in asdict(kind.rope.yarn).items() if name not in ("truncate", "attn_factor")}
    return {**options, "rope_type": "yarn", **yarn}


_OPTIONS: dict[type[AttentionKind], Callable[[Any], dict[str, Any]]] = {
    SoftmaxAttention: _softmax_options,
    SinkAttention: _softmax_options,  # the layer reads its own window
    LatentAttention: _latent_options,
    GatedDeltaNet: lambda kind: {},  # the layer reads its own kind
}
