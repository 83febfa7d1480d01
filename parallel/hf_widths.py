"""What a Hugging Face config.json says about a model's widths, for every architecture this project knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.shards import GeometryError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
_CORRECT = "correct the model's config.json"


@dataclass(frozen=True)
class MoEGeometry:
    """A mixture of experts: `count` MLPs of width `ffn`, and shared ones of total width `shared_ffn` (0: none)."""

    count: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()
    """Layers that have a plain MLP instead."""
    correction_bias: bool = False
    """The router adds a learnt bias when it chooses (DeepSeek-V3)."""


@dataclass(frozen=True)
class MLAGeometry:
    """Multi-latent attention (MLA): queries and keys/values through low-rank projections."""

    q_rank: int
    """0: queries are projected directly."""
    kv_rank: int
    nope_dim: int
    """Width of a query or key head without position."""
    rope_dim: int
    """Width of its part with rotary position; the key's is shared by all heads."""
    v_dim: int


def parse_widths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ModelGeometry. Raise GeometryError for an unknown architecture, or a missing or unsupported field."""
    kind = config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise GeometryError(
            "model_type", kind, "is not known", f"use a model of one of these architectures: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field) and kind != "qwen2":
            raise GeometryError(field, config[field], f"is not supported for {kind}", "use a model without these biases")
    heads = _positive(config, "num_attention_heads")
    kv_heads = heads if kind == "deepseek_v3" else _positive(config, "num_key_value_heads", heads if kind == "llama" else None)
    if heads % kv_heads:
        raise GeometryError("num_attention_heads", heads, f"must be a multiple of num_key_value_heads ({kv_heads})", _CORRECT)
    widths: dict[str, Any] = {
        "kind": kind,
        "layers": _positive(config, "num_hidden_layers"),
        "hidden": _positive(config, "hidden_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": _positive(config, "intermediate_size"),
        "vocab": _positive(config, "vocab_size"),
        "tied": bool(config.get("tie_word_embeddings", False)),
    }
    if kind == "deepseek_v3":
        latent = _parse_mla(config)
        return {**widths, "head_dim": latent.nope_dim + latent.rope_dim, "latent": latent, "experts": _parse_deepseek_experts(config)}
    widths["head_dim"] = _parse_head_dim(config, widths["hidden"], heads)
    if kind == "qwen3_moe":
        widths["experts"] = _parse_qwen_experts(config)
    return widths


def _parse_head_dim(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None or config["model_type"] not in ("llama", "qwen2"):  # the others have defaults of their own
        return _positive(config, "head_dim")
    if hidden % heads:
        raise GeometryError("head_dim", None, f"is missing, and hidden_size ({hidden}) is no multiple of {heads} heads", _CORRECT)
    return hidden // heads


def _parse_mla(config: Mapping[str, Any]) -> MLAGeometry:
    return MLAGeometry(
        q_rank=0 if config.get("q_lora_rank", "missing") is None else _positive(config, "q_lora_rank"),
        kv_rank=_positive(config, "kv_lora_rank"),
        nope_dim=_positive(config, "qk_nope_head_dim"),
        rope_dim=_positive(config, "qk_rope_head_dim"),
        v_dim=_positive(config, "v_head_dim"),
    )


def _parse_deepseek_experts(config: Mapping[str, Any]) -> MoEGeometry:
    layers, first_dense = _positive(config, "num_hidden_layers"), config.get("first_k_dense_replace", 0)
    moe_step = _positive(config, "moe_layer_freq", 1)
    ffn = _positive(config, "moe_intermediate_size")
    return MoEGeometry(
        count=_positive(config, "n_routed_experts"),
        ffn=ffn,
        shared_ffn=ffn * (config.get("n_shared_experts") or 0),
        dense_layers=frozenset(layer for layer in range(layers) if layer < first_dense or layer % moe_step),
        correction_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",
    )


def _parse_qwen_experts(config: Mapping[str, Any]) -> MoEGeometry:
    layers, moe_step = _positive(config, "num_hidden_layers"), _positive(config, "decoder_sparse_step", 1)
    mlp_only = set(config.get("mlp_only_layers") or ())
    count_field = "num_local_experts" if "num_local_experts" in config else "num_experts"  # transformers 5 writes the first name
    return MoEGeometry(
        count=_positive(config, count_field),
        ffn=_positive(config, "moe_intermediate_size"),
        dense_layers=frozenset(layer for layer in range(layers) if layer in mlp_only or (layer + 1) % moe_step),
    )


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    if field not in config:
        if default is not None:
            return default
        raise GeometryError(field, None, "is missing from the model's config.json", "add it")
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GeometryError(field, value, "must be a positive integer", _CORRECT)
    return value
