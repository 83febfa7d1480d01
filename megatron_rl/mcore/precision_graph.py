"""Reads the training graph from the live Megatron model: what its modules hold and run, not what a configuration says.

Quantized linear layers are recognized by their blocks. A parameter that belongs to no operator read here, or a module of an unknown
class, is refused: an incomplete graph proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_rl.errors import RunError
from megatron_rl.kernels.linear import make_grouped_backend
from megatron_rl.kernels.rope.reference import rotates_rows
from megatron_rl.mcore.layers.attention.mla import AbsorbedLatentAttention
from megatron_rl.mcore.layers.linear.output_layer import ValueHead
from megatron_rl.mcore.layers.linear.row_parallel import TreeRowParallelLinear
from megatron_rl.mcore.layers.norms import NormedAdd
from megatron_rl.precision.graph.decoder import (
    AttentionPrecision,
    DecoderPrecision,
    GradientFormats,
    LayerPrecision,
    MLAPrecision,
    MLPPrecision,
    MoEPrecision,
    WeightedOpPrecision,
    decoder_graph,
)
from megatron_rl.precision.graph.formats import (
    block_format,
    common_format,
    dtype_name,
    group_format,
    head_format,
    layer_format,
    unquantized_format,
)
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision, merge_graphs
from parallel.adapters import NAMES
from parallel.mtp_layers import MEGATRON_PREFIX


def read_rank_graph(model: GPTModel | Sequence[GPTModel]) -> PrecisionGraph:
    """Return the graph of this rank's part: one model, or the chunks of a pipeline stage. Raise RunError for an unknown module."""
    chunks = model if isinstance(model, Sequence) else [model]
    return merge_graphs(decoder_graph(_MegatronReader(chunk).read_decoder()) for chunk in chunks)


class _MegatronReader:
    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self.seen: set[int] = set()
        embedding = getattr(model, "embedding", None)
        dtype = model.config.pipeline_dtype if embedding is None else embedding.word_embeddings.weight.dtype
        self.hidden = TensorPrecision(dtype_name(dtype))
        self.residual = TensorPrecision("fp32") if model.config.fp32_residual_connection else self.hidden

    def read_decoder(self) -> DecoderPrecision:
        model = self.model
        first, last = getattr(model, "embedding", None), getattr(model, "output_layer", None)
        precision = DecoderPrecision(
            hidden=self.hidden,
            layers={layer.layer_number - 1: self.read_layer(layer) for layer in model.decoder.layers},
            embedding=None if first is None else self.read_weighted(first.word_embeddings),
            norm=None if model.decoder.final_layernorm is None else self.read_weighted(model.decoder.final_layernorm, self.residual),
            lm_head=None if last is None else self.read_lm_head(last),
            logits=None if last is None else TensorPrecision("fp32") if isinstance(last, ValueHead) else self.hidden,
            is_critic=isinstance(last, ValueHead),
        )
        for name, parameter in model.named_parameters():
            if id(parameter) not in self.seen and not name.startswith(MEGATRON_PREFIX):  # layers that no engine has
                raise RunError(f"the precision graph knows no operator of the trainer that uses {name}")
        return precision

    def read_layer(self, layer: Any) -> LayerPrecision:
        attention = self.read_attention(_require_class(layer.self_attention, SelfAttention, MLASelfAttention))
        mlp = self.read_experts(layer.mlp) if isinstance(layer.mlp, MoELayer) else self.read_mlp([_require_class(layer.mlp, MLP)])
        return LayerPrecision(
            input_norm=self.read_weighted(layer.input_layernorm, self.residual),
            attention=self.read_post_norm(attention, layer.self_attn_bda),
            post_attention_norm=self.read_weighted(layer.pre_mlp_layernorm, self.residual),
            mlp=self.read_post_norm(mlp, layer.mlp_bda),
            residual=self.residual,
        )

    def read_post_norm(self, part: Any, add: Any) -> Any:
        """Return attention or MLP with the norm of what it adds to the residual stream, if there is one."""
        return replace(part, post_norm=self.read_weighted(add.norm)) if isinstance(add, NormedAdd) else part

    def read_attention(self, attention: Any) -> AttentionPrecision | MLAPrecision:
        if isinstance(attention, MLASelfAttention):
            return self.read_latent_attention(attention)
        head_norms = {
            name: self.read_weighted(norm)
            for name, norm in (("q_norm", attention.q_layernorm), ("k_norm", attention.k_layernorm))
            if norm is not None and not isinstance(norm, IdentityOp)
        }
        core, kv = type(attention.core_attention).__name__, self.read_cache(attention)
        qkv, output = self.read_linear(attention.linear_qkv), self.read_linear(attention.linear_proj)
        return AttentionPrecision(qkv, output, self.hidden, kv, detail=core, rope=_describe_rope(attention.linear_qkv), **head_norms)

    def read_cache(self, attention: Any) -> TensorPrecision:
        """Return the format of keys and values as the attention reads them."""
        core = attention.core_attention
        if not core.quantizes_kv:
            return self.hidden
        return head_format("e4m3") if core.kv_scales is None else layer_format("e4m3", core.kv_scales)

    def read_latent_attention(self, attention: Any) -> MLAPrecision:
        q_latent = {}
        if hasattr(attention, "linear_q_down_proj"):
            q_latent = {"q_a": self.read_linear(attention.linear_q_down_proj), "q_a_norm": self.read_weighted(attention.q_layernorm)}
        return MLAPrecision(
            q_b=self.read_linear(attention.linear_q_up_proj if q_latent else attention.linear_q_proj),
            kv_a=self.read_linear(attention.linear_kv_down_proj),
            kv_a_norm=self.read_weighted(attention.kv_layernorm),
            kv_b=self.read_linear(attention.linear_kv_up_proj),
            output=self.read_linear(attention.linear_proj),
            q=self.hidden,
            kv=self.read_cache(attention),
            absorbed=isinstance(attention, AbsorbedLatentAttention),
            detail=type(attention.core_attention).__name__,
            rope=_describe_rope(attention.linear_kv_down_proj),
            **q_latent,
        )

    def read_mlp(self, mlps: Sequence[Any], count: int = 1) -> MLPPrecision:
        """Read one MLP, or experts as one."""
        return MLPPrecision(
            _merge_experts([self.read_linear(mlp.linear_fc1) for mlp in mlps]),
            _merge_experts([self.read_linear(mlp.linear_fc2) for mlp in mlps]),
            count,
            swiglu="FP32, rounded once" if mlps[0].config.use_te_activation_func else "silu and product rounded",
        )

    def read_experts(self, moe: Any) -> MoEPrecision:
        router, local_experts = moe.router, getattr(moe.experts, "local_experts", None)
        if local_experts is None:
            raise RunError(f"the precision graph does not know the trainer's experts {type(moe.experts).__name__}")
        logits = TensorPrecision(router.config.moe_router_dtype or self.hidden.dtype)
        correction = getattr(router, "expert_bias", None)  # a buffer
        shared = getattr(moe, "shared_experts", None)
        return MoEPrecision(
            router=replace(self.read_weighted(router), bias=None if correction is None else unquantized_format(correction)),
            logits=logits,
            experts=_describe_grouping(moe.experts, self.read_mlp(local_experts, count=router.weight.shape[0])),
            shared=None if shared is None else self.read_mlp([shared]),
        )

    def read_linear(self, layer: Any) -> WeightedOpPrecision:
        """Read a linear layer and its adapter, if it has one."""
        read = self.read_plain_linear(layer)
        if not hasattr(layer, "lora_A"):
            return read
        assert read.gradients is not None
        down = layer.lora_A
        self.seen |= {id(down), id(layer.lora_B)}
        gradients = replace(read.gradients, dy_wgrad=self.hidden, x=self.hidden, grad=_gradient(down), master=_master(down), trained=NAMES)
        return replace(read, adapter=unquantized_format(down), gradients=gradients)

    def read_plain_linear(self, layer: Any) -> WeightedOpPrecision:
        """Read a quantized layer by its blocks, any other by its weight. Transformer Engine's own layers hide how they quantize."""
        if not type(layer).__module__.startswith("megatron_rl."):
            _require_class(layer, ColumnParallelLinear, RowParallelLinear)
        by_tree = isinstance(layer, TreeRowParallelLinear) and layer.config.sums_by_tree
        if layer.blocks is None:
            return replace(self.read_weighted(layer), by_tree=by_tree)
        self.seen.add(id(layer.weight))
        weight, master = block_format(*layer.blocks), TensorPrecision("fp32")
        x = tokens = self.hidden
        if layer.quantizes_input:
            group = layer.format.block[1]  # an input's groups are as long as a block is wide
            x = group_format(group, layer.format.scale_format, weight.dtype)
            tokens = TensorPrecision(x.dtype, f"{group}x1", x.scale)  # WGrad contracts over tokens: columns of x, rows of dy^T
        gradients = GradientFormats(x, weight, x, tokens, _gradient(layer.weight), master, _trained(layer.weight))
        detail = f"{type(layer).__name__}, {type(layer.backend).__name__}"
        return WeightedOpPrecision(x, weight, self.read_bias(layer), detail, gradients, by_tree)

    def read_weighted(self, module: Any, x: TensorPrecision | None = None) -> WeightedOpPrecision:
        """Read a module that multiplies its weight in high precision."""
        x, weight, format = x or self.hidden, module.weight, unquantized_format(module.weight)
        self.seen.add(id(weight))
        gradients = GradientFormats(x, format, x, x, _gradient(weight), _master(weight), _trained(weight))
        return WeightedOpPrecision(x, format, self.read_bias(module), type(module).__name__, gradients)

    def read_bias(self, module: Any) -> TensorPrecision | None:
        bias = getattr(module, "bias", None)
        if not isinstance(bias, torch.Tensor):
            return None
        self.seen.add(id(bias))
        return unquantized_format(bias)

    def read_lm_head(self, layer: Any) -> WeightedOpPrecision:
        """Read the output layer; with tied embeddings it has no weight of its own."""
        if isinstance(layer, ValueHead):
            return self.read_weighted(layer)
        if layer.weight is not None:
            return self.read_linear(layer)
        weight = self.model.shared_embedding_or_output_weight()
        self.seen.add(id(weight))
        format = unquantized_format(weight)
        gradients = GradientFormats(self.hidden, format, self.hidden, self.hidden, _gradient(weight), format, _trained(weight))
        return WeightedOpPrecision(self.hidden, format, None, f"{type(layer).__name__}, tied", gradients)


def _describe_grouping(experts: Any, mlp: MLPPrecision) -> MLPPrecision:
    """Say where all experts run in one product, whose bits are those of each expert's own, and by what."""
    if not getattr(experts, "runs_grouped", False):
        return mlp
    first = experts.local_experts[0].linear_fc1
    grouped = type(make_grouped_backend(first.config.linear_backend, first.format)).__name__
    gate_up, down = (replace(part, detail=f"{part.detail.partition(', ')[0]}, {grouped}") for part in (mlp.gate_up, mlp.down))
    return replace(mlp, gate_up=gate_up, down=down)


def _describe_rope(layer: Any) -> str:
    return "FP32, rounded once" if rotates_rows(layer.weight) else "cos, sin and products rounded"


def _gradient(weight: Any) -> TensorPrecision:
    """Return the format in which the gradient is accumulated: of Megatron's buffer, or autograd's, which has the weight's dtype."""
    return unquantized_format(getattr(weight, "main_grad", weight))


def _trained(weight: Any) -> tuple[str, ...]:
    """Return the tensors of an operator without an adapter that the optimizer steps: none where its weight is frozen."""
    return ("weight", "bias") if weight.requires_grad else ()


def _master(weight: Any) -> TensorPrecision:
    """Return the format of what the optimizer steps: the weight, or the FP32 copy of a 16-bit one, which may be on another rank."""
    return TensorPrecision("fp32") if hasattr(weight, "main_param") else unquantized_format(weight)


def _require_class(module: Any, *classes: type) -> Any:
    """Return `module`. Raise RunError where it is none of these classes."""
    if not isinstance(module, classes):
        raise RunError(f"the precision graph does not know the trainer's module {type(module).__name__}")
    return module


def _merge_experts(parts: Sequence[WeightedOpPrecision]) -> WeightedOpPrecision:
    """Return the experts as one operator; where they differ, in a precision that equals none."""
    if all(part == parts[0] for part in parts):
        return parts[0]
    return WeightedOpPrecision(
        common_format([part.x for part in parts]),
        common_format([part.weight for part in parts]),
        detail=parts[0].detail,
        by_tree=all(part.by_tree for part in parts),
    )
