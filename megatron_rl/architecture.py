"""Which model architectures the trainer builds, and what of a config.json it refuses rather than computes wrongly. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import UserError


@dataclass(frozen=True)
class Traits:
    """How an architecture differs from the plain decoder: RMSNorm on the heads of q and k, and a bias on q, k and v."""

    head_norms: bool
    qkv_bias: bool


_KNOWN = {
    "qwen3": Traits(head_norms=True, qkv_bias=False),
}


def traits_of(hf_config: Mapping[str, Any]) -> Traits:
    """The traits of a config.json. Raises UserError for an architecture, or a setting of it, that the trainer does not compute."""
    kind = hf_config.get("model_type")
    if kind not in _KNOWN:
        raise UserError("model.path", str(kind), "is an architecture the trainer does not build", f"use one of {', '.join(_KNOWN)}")
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    unbuilt = {
        "hidden_act": (hf_config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (hf_config.get("attention_bias", False), _KNOWN[kind].qkv_bias),
        "use_sliding_window": (hf_config.get("use_sliding_window", False), False),
        "rope scaling": (scaling, "default"),
    }
    for name, (value, built) in unbuilt.items():
        if value != built:
            raise UserError(f"config.json {name}", value, f"is not built in the trainer, which computes {built}", "use another model")
    return _KNOWN[kind]


def rope_theta(hf_config: Mapping[str, Any]) -> float:
    """The rotary base, in the old place (`rope_theta`) or the new one (`rope_parameters`). Raises UserError where there is none."""
    places = (hf_config.get("rope_parameters") or {}, hf_config)
    for place in places:
        if isinstance(place.get("rope_theta"), int | float):
            return float(place["rope_theta"])
    raise UserError("config.json rope_theta", None, "is missing", "add it, or rope_parameters.rope_theta")
