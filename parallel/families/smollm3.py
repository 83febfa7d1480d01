"""SmolLM3: a Llama in which some layers, usually every fourth, have no rotary positions. SGLang serves it as a Llama
(`rollout_sglang.hooks.no_positions`)."""

from dataclasses import replace
from typing import Any

from parallel.attention.softmax import read_softmax
from parallel.families import llama
from parallel.hf_config import CORRECT, HFConfig
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError

list_layer = llama.list_layer
ARCHITECTURE = "SmolLM3ForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(num_key_value_heads=4, rope_theta=2000000.0, tie_word_embeddings=True)  # as in transformers
    config.require(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False)
    config.read.add("sliding_window")  # off by use_sliding_window
    kinds = read_softmax(config, config.head_dim(), config.rope("llama3", "yarn"))
    rotated = zip(kinds, _read_rotated(config), strict=True)
    return ModelGeometry(**config.widths(), attention=tuple(kind if each else replace(kind, rope=None) for kind, each in rotated))


def _read_rotated(config: HFConfig) -> list[int]:
    """Return 1 for each layer with positions and 0 for the others: `no_rope_layers`, by default 0 at every `no_rope_layer_interval`-th."""
    layers, every = config.layers(), config.with_defaults(no_rope_layer_interval=4).size("no_rope_layer_interval")
    config.with_defaults(no_rope_layers=[int((layer + 1) % every > 0) for layer in range(layers)])
    rotated = config.sizes("no_rope_layers")
    if len(rotated) < layers or not set(rotated) <= {0, 1}:  # it may be longer
        rule = f"must be 1, for rotary positions, or 0 for each of {layers} layers"
        raise GeometryError("config.json no_rope_layers", rotated, rule, CORRECT)
    return rotated[:layers]


def describe_to_engine(config: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config.json as that of a Llama, with `no_rope_layers`."""
    kept = {name: value for name, value in config.items() if name != "layer_types"}
    return kept | {"model_type": "llama", "architectures": [llama.ARCHITECTURE]}
