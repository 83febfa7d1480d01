"""Llama 2 and 3, including the extended rotary positions of Llama 3.1."""

from parallel.hf_config import HFConfig
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry

list_layer = pre_norm_layer


def read(config: HFConfig) -> ModelGeometry:
    config = HFConfig(config.fields, num_key_value_heads=config.get("num_attention_heads"))
    config.require(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False)
    return ModelGeometry(**config.widths(), head_dim=config.head_dim(), rope=config.rope("llama3"))
