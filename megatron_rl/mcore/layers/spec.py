"""Layer specs (Megatron's ModuleSpec) that name this project's layers instead of Megatron's local ones.

Megatron's local norm refuses sequence parallelism, its local attention refuses packed input, and its specs hard-code linear layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, get_transformer_layer_offset

from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.kernels.swiglu.clamped import clamped_swiglu
from megatron_rl.mcore.layers.attention.core_attention import AbsorbedCoreAttention, CoreAttention, SinkCoreAttention
from megatron_rl.mcore.layers.attention.gated_delta_net import GatedDeltaNetLayer, GatedDeltaNetParts
from megatron_rl.mcore.layers.attention.mla import AbsorbedLatentAttention, LatentAttention, takes_absorbed_form
from megatron_rl.mcore.layers.attention.self_attention import PackedSelfAttention
from megatron_rl.mcore.layers.linear.high_precision import AbsorbedLinear, PlainColumnParallelLinear, ReplicatedLinear
from megatron_rl.mcore.layers.linear.norms import AddBeforeNorm, AllHeadsNorm, NormedAdd, RMSNorm
from megatron_rl.mcore.layers.linear.quantized_linear import (
    QuantizedAbsorbedLinear,
    QuantizedColumnParallelLinear,
    QuantizedReplicatedLinear,
    QuantizedRowParallelLinear,
    WeightOnlyQuantizedLinear,
    can_fuse_swiglu,
)
from megatron_rl.mcore.layers.linear.quantized_matmul import GateUp
from megatron_rl.mcore.layers.linear.row_parallel import TreeRowParallelLinear
from megatron_rl.mcore.layers.moe.experts import MixtureOfExperts, OutputWeightedExperts
from megatron_rl.mcore.layers.moe.router import Router
from megatron_rl.mcore.layers.moe.shared_experts import SharedExperts
from parallel import attention as kinds


class SwiGLU(MegatronModule):
    """SwiGLU for `use_te_activation_func`."""

    def forward(self, x: torch.Tensor | GateUp) -> torch.Tensor | GateUp:
        return x if isinstance(x, GateUp) else swiglu.swiglu(x)


class ClampedSwiGLU(MegatronModule):
    """The activation of gpt-oss's experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return clamped_swiglu(x, self.config.swiglu_limit)


class FusedMLP(MLP):
    """Megatron's MLP for a GPU: if its layers are quantized, the quantization kernels compute SwiGLU and its gradient."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.linear_fc1.defers_swiglu = can_fuse_swiglu(self.linear_fc1, self.linear_fc2)
        return super().forward(hidden_states, *args, **options)


class _SpecProvider(LocalSpecProvider):
    """Megatron's local layers with our linear layers, experts and activation."""

    def __init__(self, config: Any) -> None:
        self._quantized: bool = config.linear_format.quantized
        self._clamps: bool = config.swiglu_limit > 0

    def row_parallel_linear(self) -> type:
        return QuantizedRowParallelLinear if self._quantized else TreeRowParallelLinear

    def column_parallel_linear(self) -> type:
        return QuantizedColumnParallelLinear if self._quantized else PlainColumnParallelLinear

    def replicated_linear(self) -> type:
        return QuantizedReplicatedLinear if self._quantized else ReplicatedLinear

    def kv_b_linear(self) -> type:
        if takes_absorbed_form():
            return QuantizedAbsorbedLinear if self._quantized else AbsorbedLinear
        return WeightOnlyQuantizedLinear if self._quantized else PlainColumnParallelLinear

    def activation_func(self) -> Any:
        if self._clamps:
            return ClampedSwiGLU
        return SwiGLU if swiglu.is_fused() else None

    def grouped_mlp_modules(self, *_: bool) -> Any:
        parts = MLPSubmodules(self.column_parallel_linear(), self.row_parallel_linear(), self.activation_func())
        return partial(OutputWeightedExperts, submodules=parts)


def build_decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the spec of the layers of this pipeline stage or virtual stage."""
    has_experts = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers  # one entry per layer
    first, count = get_transformer_layer_offset(config, vp_stage), get_num_layers_to_build(config, vp_stage)
    experts = [config.num_moe_experts if has_experts[layer] else None for layer in range(first, first + count)]
    layers = [build_layer_spec(config, each, layer) for layer, each in enumerate(experts, first)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def build_layer_spec(config: Any, experts: int | None, layer: int = -1) -> ModuleSpec:
    """Return the spec of a layer with the given number of experts, or None for a dense layer, and the attention of the model's `layer`."""
    backend, add = _SpecProvider(config), ModuleSpec(NormedAdd if config.post_norms else AddBeforeNorm, params={"config": config})
    parts = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=_ATTENTION[type(config.attention[layer])](config, backend),
        self_attn_bda=add,
        pre_mlp_layernorm=RMSNorm,
        mlp=_mlp(backend, experts),
        mlp_bda=add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def _mlp(backend: _SpecProvider, experts: int | None) -> Any:
    builder: Any = get_mlp_module_spec_for_backend(backend=backend, num_experts=experts, use_te_activation_func=swiglu.is_fused())
    if experts is None:
        return partial(FusedMLP.as_mlp_submodule, **builder.keywords) if swiglu.is_fused() else builder
    parts = builder.keywords["submodules"]
    parts.router, parts.shared_experts = Router, partial(SharedExperts, **parts.shared_experts.keywords)
    return partial(MixtureOfExperts, **builder.keywords)


def _gated_delta_net(config: TransformerConfig, backend: _SpecProvider) -> ModuleSpec:
    parts = GatedDeltaNetParts(backend.column_parallel_linear(), backend.row_parallel_linear())
    return ModuleSpec(module=GatedDeltaNetLayer, submodules=parts)


def _attention(config: TransformerConfig, backend: _SpecProvider, core: type = CoreAttention) -> ModuleSpec:
    q_norm, k_norm = (RMSNorm, RMSNorm) if config.qk_layernorm else (IdentityOp, IdentityOp)
    if config.norms_all_heads:
        q_norm, k_norm = (partial(AllHeadsNorm, heads=count) for count in (config.num_attention_heads, config.num_query_groups))
    parts = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=core,
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=q_norm,
        k_layernorm=k_norm,
    )
    return ModuleSpec(module=PackedSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)


def _latent_attention(config: TransformerConfig, backend: _SpecProvider) -> ModuleSpec:
    absorbed = takes_absorbed_form()
    parts = MLASelfAttentionSubmodules(
        linear_q_proj=backend.column_parallel_linear(),
        linear_q_down_proj=backend.replicated_linear(),
        linear_q_up_proj=backend.column_parallel_linear(),
        linear_kv_down_proj=backend.replicated_linear(),
        linear_kv_up_proj=backend.kv_b_linear(),
        core_attention=AbsorbedCoreAttention if absorbed else CoreAttention,
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    module = AbsorbedLatentAttention if absorbed else LatentAttention
    return ModuleSpec(module=module, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)


_ATTENTION: dict[type[kinds.AttentionKind], Callable[[Any, _SpecProvider], ModuleSpec]] = {
    kinds.SoftmaxAttention: _attention,
    kinds.SinkAttention: partial(_attention, core=SinkCoreAttention),
    kinds.LatentAttention: _latent_attention,
    kinds.GatedDeltaNet: _gated_delta_net,
}
