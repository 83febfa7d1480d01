"""Llama 2 and 3, including the extended rotary positions of Llama 3.1."""

from parallel.attention.softmax import read_softmax
from parallel.hf_config import HFConfig
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry

list_layer = pre_norm_layer
ARCHITECTURE = "LlamaForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(num_key_value_heads=config.get("num_attention_heads"), rope_theta=10000.0)  # as in transformers
    config.require(hidden_act="silu", attention_bias=False, mlp_bias=False)
    return ModelGeometry(**config.widths(), attention=read_softmax(config, config.head_dim(), config.rope("llama3", "yarn")))
