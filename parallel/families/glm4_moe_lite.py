"""GLM-4.7-Flash: DeepSeek-V3 without groups of experts, and with other defaults. SGLang serves it as a DeepSeek-V3."""

from typing import Any

from parallel.families import deepseek_v3
from parallel.hf_config import HFConfig
from parallel.model_geometry import ModelGeometry

list_layer, list_mtp_layer, list_mtp_copies = deepseek_v3.list_layer, deepseek_v3.list_mtp_layer, deepseek_v3.list_mtp_copies
ARCHITECTURE = "Glm4MoeLiteForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=1.8)  # as in transformers
    config.with_defaults(first_k_dense_replace=1, num_nextn_predict_layers=0).require(partial_rotary_factor=1.0)
    layers, dense = config.layers(), config.size("first_k_dense_replace", least=0)
    config.require(mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(layers)])
    return deepseek_v3.read(config)


def describe_to_engine(config: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config.json as that of a DeepSeek-V3."""
    kept = {name: value for name, value in config.items() if name not in ("mlp_layer_types", "partial_rotary_factor")}
    return kept | {"model_type": "deepseek_v3", "architectures": [deepseek_v3.ARCHITECTURE]}
