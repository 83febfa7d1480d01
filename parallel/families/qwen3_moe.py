"""Qwen3-MoE: Qwen3 with experts, chosen by a softmax over all experts; some layers may have a plain MLP instead."""

from dataclasses import replace

from parallel.families import qwen3
from parallel.hf_config import MOST_EXPERTS, HFConfig, refuse
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry, MoEGeometry

list_layer = pre_norm_layer
ARCHITECTURE = "Qwen3MoeForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(num_experts_per_tok=8, norm_topk_prob=False)  # as in transformers
    config.require(shared_expert_intermediate_size=0)
    return replace(qwen3.read(config), experts=read_experts(config), tied_in_engine=False)


def read_experts(config: HFConfig) -> MoEGeometry:
    """Read experts chosen by a softmax, and a gated shared expert if `shared_expert_intermediate_size` is positive."""
    config.with_defaults(decoder_sparse_step=1)
    named = [name for name in ("num_local_experts", "num_experts") if name in config.fields]  # transformers 5 writes the first
    count, *_ = [config.size(name, most=MOST_EXPERTS) for name in named or ["num_local_experts"]]
    layers, shared = config.layers(), config.with_defaults(shared_expert_intermediate_size=0).size("shared_expert_intermediate_size", 0)
    top_k, normalized = config.size("num_experts_per_tok", most=count), config.flag("norm_topk_prob")
    if top_k == 1 and normalized:  # a weight that is always 1 gives the router no gradient: Megatron refuses it
        raise refuse("norm_topk_prob with num_experts_per_tok = 1", True, False)
    step, mlp_only = config.size("decoder_sparse_step"), set(config.sizes("mlp_only_layers"))
    return MoEGeometry(
        count=count,
        ffn=config.size("moe_intermediate_size"),
        shared_ffn=shared,
        shared_gate=shared > 0,
        dense_layers=frozenset(layer for layer in range(layers) if layer in mlp_only or (layer + 1) % step),
        dense_in_engine=False,
        top_k=top_k,
        normalized=normalized,
    )
