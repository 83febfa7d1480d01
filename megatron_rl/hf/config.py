"""What a forward pass needs from a config.json beside widths: rotary positions and the routing of experts. No torch.

Settings that the trainer does not compute are refused. `parallel.hf_widths` reads the widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import UserError
from parallel.hf_widths import SUPPORTED_MODEL_TYPES

_LLAMA3_SUPPORTED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The values that Megatron's RotaryEmbedding has as constants; all Llama 3 models have them."""


@dataclass(frozen=True)
class YarnConfig:
    """YaRN (arXiv 2309.00071) as DeepSeek-V3 uses it, with its correction of the softmax scale."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base, and at most one way of stretching it to longer texts."""

    theta: float
    llama3_factor: float | None = None
    yarn: YarnConfig | None = None


@dataclass(frozen=True)
class RoutingConfig:
    """How a token chooses its experts, and how it weights their outputs."""

    top_k: int
    sigmoid: bool
    """Scores are sigmoids of the logits; otherwise a softmax over all experts."""
    normalized: bool
    """The chosen experts' weights add up to `scale`."""
    scale: float = 1.0
    groups: int = 1
    """Experts form this many equal groups, of which a token may use `groups_used`."""
    groups_used: int = 1


@dataclass(frozen=True)
class ForwardConfig:
    """What a config.json says beyond widths. `routing`: of the layers that have experts, if any."""

    rope: RopeConfig
    routing: RoutingConfig | None = None


def parse_forward_config(hf_config: Mapping[str, Any]) -> ForwardConfig:
    """Parse a config.json. Raise UserError for an architecture, or a setting of it, that the trainer does not compute."""
    kind = hf_config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            "model.path", str(kind), "is an architecture the trainer does not build", f"use one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    rope = _rope_settings(hf_config)
    unsupported = {
        "hidden_act": (hf_config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(hf_config.get("attention_bias", False)) and kind != "qwen2", False),
        "use_sliding_window": (hf_config.get("use_sliding_window", False), False),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0)), 1.0),
        "rope_interleave": (hf_config.get("rope_interleave", True), True),
    }
    for name, (value, supported) in unsupported.items():
        if value != supported:
            raise _unsupported(name, value, supported)
    routing = {"qwen3_moe": _parse_softmax_routing, "deepseek_v3": _parse_sigmoid_routing}.get(kind)
    return ForwardConfig(rope=_parse_rope(hf_config, rope, latent=kind == "deepseek_v3"), routing=routing(hf_config) if routing else None)


def rope_theta(hf_config: Mapping[str, Any]) -> float:
    """Return the rotary base, from `rope_parameters` or, as older files have it, `rope_theta`. Raise UserError where there is none."""
    for settings in (hf_config.get("rope_parameters") or {}, hf_config):
        if isinstance(settings.get("rope_theta"), int | float):
            return float(settings["rope_theta"])
    raise UserError("config.json rope_theta", None, "is missing", "add it, or rope_parameters.rope_theta")


def _unsupported(name: str, value: object, supported: object) -> UserError:
    return UserError(f"config.json {name}", value, f"is not built in the trainer, which computes {supported}", "use another model")


def _rope_settings(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    return hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}


def _parse_rope(hf_config: Mapping[str, Any], settings: Mapping[str, Any], latent: bool) -> RopeConfig:
    theta, kind = rope_theta(hf_config), settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "yarn" and latent:
        return RopeConfig(theta, yarn=_parse_yarn(settings))
    if kind == "llama3" and not latent:
        for name, supported in _LLAMA3_SUPPORTED.items():
            if settings.get(name) != supported:
                raise _unsupported(f"llama3 rope {name}", settings.get(name), supported)
        return RopeConfig(theta, llama3_factor=_number(settings, "factor", "llama3 rope"))
    raise _unsupported("rope scaling", kind, "yarn with latent attention" if latent else "default and llama3")


def _parse_yarn(settings: Mapping[str, Any]) -> YarnConfig:
    for name, supported in {"attention_factor": None, "truncate": True}.items():
        if settings.get(name, supported) != supported:
            raise _unsupported(f"yarn rope {name}", settings[name], supported)
    return YarnConfig(
        factor=_number(settings, "factor", "yarn rope"),
        original_length=int(_number(settings, "original_max_position_embeddings", "yarn rope")),
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        mscale=_number(settings, "mscale", "yarn rope"),  # without the two, libraries disagree on what they default to
        mscale_all_dim=_number(settings, "mscale_all_dim", "yarn rope"),
    )


def _number(settings: Mapping[str, Any], name: str, what: str) -> float:
    value = settings.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UserError(f"config.json {what} {name}", value, "must be a positive number", "correct the model's config.json")
    return float(value)


def _parse_softmax_routing(hf_config: Mapping[str, Any]) -> RoutingConfig:
    """Qwen3-MoE: softmax over all experts, the largest `num_experts_per_tok`; the default values are transformers'."""
    top_k, normalized = int(hf_config.get("num_experts_per_tok", 8)), bool(hf_config.get("norm_topk_prob", False))
    if top_k == 1 and normalized:  # a weight that is always 1 gives the router no gradient: Megatron refuses it
        raise _unsupported("norm_topk_prob with num_experts_per_tok = 1", True, False)
    return RoutingConfig(top_k=top_k, sigmoid=False, normalized=normalized)


def _parse_sigmoid_routing(hf_config: Mapping[str, Any]) -> RoutingConfig:
    """DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): sigmoid scores, a bias for the choice only, choice limited to some groups."""
    supported = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
    for name, value in supported.items():
        if hf_config.get(name, value) != value:
            raise _unsupported(name, hf_config[name], value)
    top_k, groups, used = (
        int(hf_config.get(name, default)) for name, default in (("num_experts_per_tok", 8), ("n_group", 8), ("topk_group", 4))
    )
    if top_k == 1:
        raise _unsupported("num_experts_per_tok", 1, "at least 2")
    if groups > used and top_k // used != 2:  # Megatron ranks a group by its best top_k / topk_group experts, DeepSeek by its best two
        raise _unsupported("num_experts_per_tok / topk_group", top_k / used, 2)
    return RoutingConfig(
        top_k=top_k,
        sigmoid=True,
        normalized=True,
        scale=float(hf_config.get("routed_scaling_factor", 2.5)),
        groups=groups,
        groups_used=used,
    )
