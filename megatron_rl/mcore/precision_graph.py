"""Reads the training graph from the live Megatron model: from the blocks and classes of its modules, not from the configuration.

A parameter that no known operator uses, or a module of an unknown class, is refused: an incomplete graph proves nothing.
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
from megatron_rl.precision.graph.decoder import DecoderPrecision, Gradients, LayerPrecision, Operator, decoder_graph
from megatron_rl.precision.graph.formats import block_format, common_format, dtype_name, scale_format, unquantized_format
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision, merge_graphs
from parallel.adapters import NAMES
from parallel.mtp_layers import MEGATRON_PREFIX

FP32 = TensorPrecision("fp32")
_ATTENTION = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
"""Operator of an attention -> its module."""
_LATENT_ATTENTION = {"q_a_norm": "q_layernorm", "kv_a_norm": "kv_layernorm"}
_ATTENTION_LINEARS = {
    "qkv": "linear_qkv",
    "q_a": "linear_q_down_proj",
    "kv_a": "linear_kv_down_proj",
    "kv_b": "linear_kv_up_proj",
    "output": "linear_proj",
}


def read_rank_graph(model: GPTModel | Sequence[GPTModel]) -> PrecisionGraph:
    """Return the graph of this rank's model, or of the chunks of its pipeline stage. Raise RunError for an unknown module."""
    chunks = model if isinstance(model, Sequence) else [model]
    return merge_graphs(decoder_graph(_Reader(chunk).read_decoder()) for chunk in chunks)


class _Reader:
    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self.seen: set[int] = set()
        embedding = getattr(model, "embedding", None)
        dtype = model.config.pipeline_dtype if embedding is None else embedding.word_embeddings.weight.dtype
        self.hidden = TensorPrecision(dtype_name(dtype))
        self.residual = FP32 if model.config.fp32_residual_connection else self.hidden

    def read_decoder(self) -> DecoderPrecision:
        model, ends = self.model, {}
        if (embedding := getattr(model, "embedding", None)) is not None:
            ends["embedding"] = self.read_weighted(embedding.word_embeddings).with_inputs(x=None)
        if (head := getattr(model, "output_layer", None)) is not None:
            ends["norm"] = self.read_weighted(model.decoder.final_layernorm, self.residual)
            if isinstance(head, ValueHead):
                ends |= {"value_head": self.read_weighted(head), "values": Operator({"x": FP32})}
            else:
                ends |= {"lm_head": self.read_lm_head(head), "logprobs": Operator({"x": self.hidden})}
        precision = DecoderPrecision(self.hidden, {layer.layer_number - 1: self.read_layer(layer) for layer in model.decoder.layers}, ends)
        for name, parameter in model.named_parameters():
            if id(parameter) not in self.seen and not name.startswith(MEGATRON_PREFIX):  # the engine has no such layers
                raise RunError(f"the precision graph has no operator that uses the trainer's parameter {name}")
        return precision

    def read_layer(self, layer: Any) -> LayerPrecision:
        attention, mlp = _require_class(layer.self_attention, SelfAttention, MLASelfAttention), layer.mlp
        norms = {"input_norm": layer.input_layernorm, "post_attention_norm": layer.pre_mlp_layernorm}
        operators = {name: self.read_weighted(norm, self.residual) for name, norm in norms.items()} | self.read_attention(attention)
        logits = None
        if isinstance(mlp, MoELayer):
            logits = TensorPrecision(mlp.router.config.moe_router_dtype or self.hidden.dtype)
            operators |= self.read_experts(mlp)
        else:
            operators |= self.read_mlp("mlp", [_require_class(mlp, MLP)])
        for name, add in (("attention.post_norm", layer.self_attn_bda), ("mlp.post_norm", layer.mlp_bda)):
            if isinstance(add, NormedAdd):
                operators[name] = self.read_weighted(add.norm)
        first_linear = getattr(attention, "linear_qkv", None) or attention.linear_kv_down_proj
        return LayerPrecision(
            operators,
            self.residual,
            self.read_cache(attention.core_attention),
            attention=type(attention.core_attention).__name__,
            rope="FP32, rounded once" if rotates_rows(first_linear.weight) else "cos, sin and products rounded",
            swiglu="FP32, rounded once" if layer.config.use_te_activation_func else "silu and product rounded",
            logits=logits,
        )

    def read_attention(self, attention: Any) -> dict[str, Operator]:
        latent = isinstance(attention, MLASelfAttention)
        linears = {name: getattr(attention, module, None) for name, module in _ATTENTION_LINEARS.items()}
        norms = {name: getattr(attention, module, None) for name, module in (_LATENT_ATTENTION if latent else _ATTENTION).items()}
        if latent and linears["q_a"] is None:
            linears["q_b"], norms["q_a_norm"] = attention.linear_q_proj, None
        elif latent:
            linears["q_b"] = attention.linear_q_up_proj
        operators = {f"attention.{name}": self.read_linear(layer) for name, layer in linears.items() if layer is not None}
        norms = {name: norm for name, norm in norms.items() if norm is not None and not isinstance(norm, IdentityOp)}
        operators |= {f"attention.{name}": self.read_weighted(norm) for name, norm in norms.items()}
        if isinstance(attention, AbsorbedLatentAttention):
            operators["attention.kv_b.k"] = operators["attention.kv_b.v"] = operators.pop("attention.kv_b")
        return operators

    def read_cache(self, core: Any) -> TensorPrecision:
        """Return the format of keys and values as the attention reads them."""
        if not core.quantizes_kv:
            return self.hidden
        by_head = core.kv_scales is None
        return TensorPrecision("e4m3", "head", "pow2") if by_head else TensorPrecision("e4m3", "layer", scale_format(core.kv_scales))

    def read_mlp(self, name: str, mlps: Sequence[Any], count: int = 1) -> dict[str, Operator]:
        """Read one MLP, or equal experts as one."""
        sides = {"gate_up": [mlp.linear_fc1 for mlp in mlps], "down": [mlp.linear_fc2 for mlp in mlps]}
        return {
            f"{name}.{side}": replace(_merge([self.read_linear(each) for each in layers]), count=count) for side, layers in sides.items()
        }

    def read_experts(self, moe: Any) -> dict[str, Operator]:
        router, local_experts, shared = moe.router, getattr(moe.experts, "local_experts", None), getattr(moe, "shared_experts", None)
        if local_experts is None:
            raise RunError(f"the precision graph does not know the trainer's experts {type(moe.experts).__name__}")
        experts = self.read_mlp("mlp.experts", local_experts, router.weight.shape[0])
        if getattr(moe.experts, "runs_grouped", False):  # in one product, whose bits are those of each expert's own
            first = local_experts[0].linear_fc1
            grouped = type(make_grouped_backend(first.config.linear_backend, first.format)).__name__
            experts = {name: replace(each, detail=f"{each.detail.partition(', ')[0]}, {grouped}") for name, each in experts.items()}
        correction = getattr(router, "expert_bias", None)  # a buffer
        bias = None if correction is None else unquantized_format(correction)
        shared_experts = {} if shared is None else self.read_mlp("mlp.shared_experts", [shared])
        return {"mlp.router": self.read_weighted(router).with_inputs(bias=bias), **experts, **shared_experts}

    def read_linear(self, layer: Any) -> Operator:
        """Read a linear layer and its adapter, if it has one."""
        operator = self.read_plain_linear(layer)
        if not hasattr(layer, "lora_A"):
            return operator
        assert operator.gradients is not None
        a, hidden = layer.lora_A, self.hidden
        self.seen |= {id(a), id(layer.lora_B)}
        gradients = replace(operator.gradients, dy_wgrad=hidden, x=hidden, grad=_gradient(a), master=_master(a), trained=NAMES)
        return replace(operator.with_inputs(**dict.fromkeys(NAMES, unquantized_format(a))), gradients=gradients)

    def read_plain_linear(self, layer: Any) -> Operator:
        """Read a quantized layer by its blocks, another layer by its weight. Transformer Engine's own layers hide how they quantize."""
        if not type(layer).__module__.startswith("megatron_rl."):
            _require_class(layer, ColumnParallelLinear, RowParallelLinear)
        by_tree = isinstance(layer, TreeRowParallelLinear) and layer.config.sums_by_tree
        if layer.blocks is None:
            return replace(self.read_weighted(layer), by_tree=by_tree)
        self.seen.add(id(layer.weight))
        weight = block_format(*layer.blocks)
        x = tokens = self.hidden
        if layer.quantizes_input:
            group, scale = layer.format.block[1], layer.format.scale_format  # a group of the input is as long as a block is wide
            x = TensorPrecision(weight.dtype, f"1x{group}", scale)
            tokens = TensorPrecision(weight.dtype, f"{group}x1", scale)  # WGrad contracts over tokens: columns of x, rows of dy^T
        gradients = Gradients(x, weight, x, tokens, _gradient(layer.weight), FP32, _trained(layer.weight))
        detail = f"{type(layer).__name__}, {type(layer.backend).__name__}"
        return Operator({"x": x, "weight": weight}, detail, gradients, by_tree).with_inputs(bias=self.read_bias(layer))

    def read_weighted(self, module: Any, x: TensorPrecision | None = None) -> Operator:
        """Read a module that multiplies its weight in high precision."""
        x, weight, format = x or self.hidden, module.weight, unquantized_format(module.weight)
        self.seen.add(id(weight))
        gradients = Gradients(x, format, x, x, _gradient(weight), _master(weight), _trained(weight))
        return Operator({"x": x, "weight": format}, type(module).__name__, gradients).with_inputs(bias=self.read_bias(module))

    def read_bias(self, module: Any) -> TensorPrecision | None:
        if not isinstance(bias := getattr(module, "bias", None), torch.Tensor):
            return None
        self.seen.add(id(bias))
        return unquantized_format(bias)

    def read_lm_head(self, layer: Any) -> Operator:
        """Read the output layer, which has no weight of its own if embeddings are tied."""
        if layer.weight is not None:
            return self.read_linear(layer)
        weight = self.model.shared_embedding_or_output_weight()
        self.seen.add(id(weight))
        hidden, format = self.hidden, unquantized_format(weight)
        gradients = Gradients(hidden, format, hidden, hidden, _gradient(weight), format, _trained(weight))
        return Operator({"x": hidden, "weight": format}, f"{type(layer).__name__}, tied", gradients)


def _gradient(weight: Any) -> TensorPrecision:
    """Return the format in which the gradient is accumulated: that of Megatron's buffer, or of the weight if autograd accumulates it."""
    return unquantized_format(getattr(weight, "main_grad", weight))


def _trained(weight: Any) -> tuple[str, ...]:
    """Return the tensors of an operator without an adapter that the optimizer steps."""
    return ("weight", "bias") if weight.requires_grad else ()


def _master(weight: Any) -> TensorPrecision:
    """Return the format that the optimizer steps: the weight, or the FP32 copy of a 16-bit weight, which may be on another rank."""
    return FP32 if hasattr(weight, "main_param") else unquantized_format(weight)


def _require_class(module: Any, *classes: type) -> Any:
    """Return `module`. Raise RunError if it is not an instance of `classes`."""
    if not isinstance(module, classes):
        raise RunError(f"the precision graph does not know the trainer's module {type(module).__name__}")
    return module


def _merge(parts: Sequence[Operator]) -> Operator:
    """Return equal experts as one operator; if they differ, in a precision that equals no other."""
    if all(part == parts[0] for part in parts):
        return parts[0]
    inputs = {tensor: common_format([part.inputs[tensor] for part in parts]) for tensor in ("x", "weight")}
    return Operator(inputs, parts[0].detail, by_tree=all(part.by_tree for part in parts))
