"""Megatron's TransformerConfig for a model, a layout and a precision contract."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_rl.config import TrainConfig
from megatron_rl.kernels.attention.requirements import choose_shared
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.mcore.attention_kinds import attention_options
from megatron_rl.precision.contract import PrecisionContract
from parallel.attention import AttentionKind
from parallel.formats import BF16, TensorFormat
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry


@dataclass
class QuantizedTransformerConfig(TransformerConfig):
    """Megatron's config with the fields that this project's layers read; see `PrecisionContract` for the formats."""

    linear_format: TensorFormat = BF16
    linear_backend: str = "emulated"
    sums_by_tree: bool = True
    shared_attention: str = ""  # that of the engine on a GPU (`attention.requirements.choose_shared`); "": none
    row_parts: int = 1  # of a row-parallel sum with `precision.reduction = "ranks"`
    at_once: tuple[int, int] = (1, 1)  # number of micro-batches that run at once in passes (without gradient, with gradient)
    quantize_kv: bool = False
    scale_kv_by_layer: bool = False
    norms_all_heads: bool = False  # with `qk_layernorm`, whether all heads of a token have one norm
    post_norms: bool = False  # normalize the outputs of attention and MLP before they are added to the residual stream
    attention_length: float = math.inf  # see `ModelGeometry.attention_length`
    attention: tuple[AttentionKind, ...] = ()  # of each layer of the whole model
    zero_centered_norms: bool = False  # norms multiply by 1 + weight
    swiglu_limit: float = 0.0  # see `MoEGeometry.swiglu_limit`
    yarn_rotary_scaling_factor: float = 1.0  # with the next two, what Megatron's plain attention multiplies cosines and sines by
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_attn_factor: float = 1.0  # what they are multiplied by on top of that
    trained_mtp_layers: int = 0
    """Number of trained MTP layers. Megatron's own `mtp_num_layers` stays unset, since it would change the model's forward pass and its
    embedding gradient."""


@dataclass
class QuantizedMLATransformerConfig(QuantizedTransformerConfig, MLATransformerConfig):
    """The same for multi-latent attention."""


def build_transformer_config(
    geometry: ModelGeometry, layout: Layout, contract: PrecisionContract, train: TrainConfig
) -> QuantizedTransformerConfig:
    """Return Megatron's config of a model."""
    dtype, quantized = getattr(torch, contract.high_format.dtype), contract.trainer_format.quantized
    attention = attention_options(geometry)
    clamps = geometry.experts is not None and geometry.experts.swiglu_limit > 0  # gpt-oss, where all linear layers have biases
    return (QuantizedMLATransformerConfig if attention.get("multi_latent_attention") else QuantizedTransformerConfig)(
        num_layers=geometry.layers,
        hidden_size=geometry.hidden,
        ffn_hidden_size=geometry.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=geometry.norm_eps,
        add_bias_linear=clamps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,  # both fusions need torch.compile and a C++ compiler
        use_te_activation_func=clamps or swiglu.is_fused(),  # our activation, chosen by the layer spec
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        calculate_per_token_loss=True,  # gradients are summed over replicas and divided by all their tokens
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=False,  # the layers add gradients in place themselves
        moe_token_dispatcher_type="alltoall",  # Megatron validates it even for dense models
        linear_format=contract.trainer_format,
        linear_backend=contract.backend,
        sums_by_tree=contract.sums_by_tree,
        shared_attention=choose_shared(geometry.attention, contract.attention) if contract.sums_by_ranks else "",
        row_parts=max(contract.parts, layout.tp) if contract.sums_by_ranks else 1,
        quantize_kv=contract.trainer_quantizes_kv,
        scale_kv_by_layer=contract.scales_kv_by_layer,
        post_norms=geometry.post_norms,
        attention_length=geometry.attention_length,
        attention=geometry.attention,
        zero_centered_norms=geometry.zero_centered_norms,
        swiglu_limit=geometry.experts.swiglu_limit if geometry.experts else 0.0,
        hetereogenous_dist_checkpoint=len(set(geometry.attention)) > 1,  # otherwise Megatron stacks the tensors of all layers
        trained_mtp_layers=geometry.mtp_layers if geometry.trains_mtp else 0,
        at_once=(train.count_at_once(layout, quantized, False), train.count_at_once(layout, quantized, True)),
        **layout_options(layout, train),
        **recompute_options(train, geometry),
        **attention,
        **expert_options(geometry),
    )


def layout_options(layout: Layout, train: TrainConfig) -> dict[str, Any]:
    """Return the parallel sizes and the options of pipeline communication."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1 and train.layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers or None,
        "overlap_p2p_comm": layout.vpp > 1,  # batched messages are mixed up if two stages are each other's neighbors on both sides
        "batch_p2p_comm": layout.vpp == 1,
        "batch_p2p_sync": False,  # a device synchronization that only old releases of PyTorch need
        "variable_seq_lengths": layout.pp > 1,  # see `mcore.passes.pipeline`
        "deallocate_pipeline_outputs": layout.pp > 1,  # a stage does not keep what it sent
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
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_topk": experts.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        # softmax before top-k leaves the weights as they are; softmax after top-k normalizes them
        "moe_router_pre_softmax": not experts.sigmoid and not experts.normalized,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        "moe_router_num_groups": experts.groups if limited else None,
        "moe_router_group_topk": experts.groups_used if limited else None,
        "moe_router_enable_expert_bias": experts.correction_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
    }
