"""Options of Megatron's TransformerConfig for the layout, recomputation, a model's experts and its attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_rl.config import TrainConfig
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry


def layout_options(layout: Layout, train: TrainConfig) -> dict[str, Any]:
    """Return the sizes of the parallel dimensions, and how pipeline stages communicate."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1 and train.layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers or None,
        "overlap_p2p_comm": layout.vpp > 1,  # where two stages follow each other in turn, batched messages get mixed up
        "batch_p2p_comm": layout.vpp == 1,
        "batch_p2p_sync": False,  # a wait for the device that only old releases of PyTorch need
        "variable_seq_lengths": layout.pp > 1,  # see `mcore.passes.pipeline`
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def recompute_options(train: TrainConfig, geometry: ModelGeometry) -> dict[str, Any]:
    """Return which activations are recomputed in the backward pass."""
    if train.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if train.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"] if geometry.experts else ["mlp"]}
    return {}


def attention_options(geometry: ModelGeometry) -> dict[str, Any]:
    """Return heads of plain attention, or ranks and head dimensions of latent attention with its own rotary embedding."""
    latent, rope, yarn = geometry.latent, geometry.rope, geometry.rope.yarn
    if latent is None:
        return {"num_query_groups": geometry.kv_heads, "kv_channels": geometry.head_dim, "rotary_interleaved": rope.interleaved}
    options: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rotary_base": rope.theta,
    }
    if yarn is None:  # Megatron applies the scaling factor's correction of the softmax scale to plain rotary positions as well
        return {**options, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {**options, "rope_type": "yarn", **asdict(yarn)}


def expert_options(geometry: ModelGeometry) -> dict[str, Any]:
    """Return the options of the experts and their router. Load balancing is off; an actor may turn it on."""
    experts = geometry.experts
    if experts is None:
        return {}
    limited = experts.groups > experts.groups_used
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(geometry.has_experts(layer)) for layer in range(geometry.layers)],
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_router_topk": experts.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        # softmax before the choice leaves the weights as they are; after it, they add up to one
        "moe_router_pre_softmax": not experts.sigmoid and not experts.normalized,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        "moe_router_num_groups": experts.groups if limited else None,
        "moe_router_group_topk": experts.groups_used if limited else None,
        "moe_router_enable_expert_bias": experts.correction_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
    }
