"""Qwen2 and Qwen2.5: q, k and v have biases, which config.json does not mention."""

from parallel.attention.softmax import read_softmax
from parallel.hf_config import HFConfig
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry

list_layer = pre_norm_layer
ARCHITECTURE = "Qwen2ForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.require(hidden_act="silu", use_sliding_window=False)
    config.read.add("sliding_window")  # off by use_sliding_window
    attention = read_softmax(config, config.head_dim(), config.rope("llama3", "yarn"), qkv_bias=True)
    return ModelGeometry(**config.widths(), attention=attention)
