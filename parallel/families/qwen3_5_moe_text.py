"""Qwen3.5 and 3.6 with experts in every layer, beside one gated shared expert."""

from parallel.families import qwen3_next
from parallel.families.qwen3_moe import read_experts
from parallel.hf_config import HFConfig
from parallel.model_geometry import ModelGeometry

list_layer, list_mtp_layer = qwen3_next.list_layer, qwen3_next.list_mtp_layer
ARCHITECTURE = "Qwen3_5MoeForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(num_experts_per_tok=8, norm_topk_prob=True, intermediate_size=config.get("moe_intermediate_size"))
    config.require(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    return qwen3_next.read_hybrid(config, grouped=False, experts=read_experts(config))
