"""Qwen3: q and k heads are normalized, and `head_dim` is required."""

from parallel.attention.softmax import read_softmax
from parallel.hf_config import HFConfig
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry

list_layer = pre_norm_layer
ARCHITECTURE = "Qwen3ForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.require(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False, use_qk_norm=True)
    config.read.add("sliding_window")  # off by use_sliding_window
    attention = read_softmax(config, config.size("head_dim"), config.rope("llama3", "yarn"), qk_norm=True)
    return ModelGeometry(**config.widths(), attention=attention)
