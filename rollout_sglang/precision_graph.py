"""Read the rollout graph inside a scheduler process from the live SGLang model: weights, scales, and the methods that use them.

A parameter that belongs to no operator read here, or an unknown quantization method, is refused: an incomplete graph proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.precision.graph.decoder import (
    AttentionPrecision,
    DecoderPrecision,
    LayerPrecision,
    MLAPrecision,
    MLPPrecision,
    MoEPrecision,
    WeightedOpPrecision,
    decoder_graph,
)
from megatron_rl.precision.graph.formats import (
    block_format,
    channel_format,
    dtype_name,
    group_format,
    head_format,
    layer_format,
    token_format,
    unquantized_format,
)
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision
from parallel.adapters import NAMES
from rollout_sglang.hooks import cpu_kv_cache, kv_cache_scales, tree_reduction

_KNOWN_METHODS = (
    "Fp8LinearMethod",
    "Fp8MoEMethod",
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
    "Fp32RouterMethod",
    "W8A8Int8LinearMethod",
    "W8A8Int8MoEMethod",
)


def read_rank_graph(runner: Any, activations: Mapping[str, str]) -> PrecisionGraph:
    """Return the graph of the model that this rank serves. `runner`: SGLang's ModelRunner, which owns the model, the attention backend and
    the cache; `activations`: module name -> format of its inputs. Raise ValueError for an unknown module."""
    return decoder_graph(_GraphReader(runner, activations).read_decoder())


class _GraphReader:
    def __init__(self, runner: Any, activations: Mapping[str, str]) -> None:
        model = runner.model
        self.model, self.runner, self.activations = model, runner, activations
        self.names = {id(module): name for name, module in model.named_modules()}
        self.seen: set[int] = set()
        self.hidden = unquantized_format(model.model.embed_tokens.weight)

    def read_decoder(self) -> DecoderPrecision:
        model, stack = self.model, self.model.model
        fp32_head = getattr(model.logits_processor, "use_fp32_lm_head", False)
        precision = DecoderPrecision(
            hidden=self.hidden,
            layers={number: self.read_layer(layer) for number, layer in enumerate(stack.layers)},
            embedding=self.read_linear(stack.embed_tokens),
            norm=self.read_norm(stack.norm, self.read_residual(stack.norm)),
            lm_head=self.read_linear(model.lm_head, TensorPrecision("fp32") if fp32_head else unquantized_format(model.lm_head.weight)),
            logits=TensorPrecision("fp32") if fp32_head else self.hidden,
        )
        for name, parameter in model.named_parameters():
            if id(parameter) not in self.seen:
                raise ValueError(f"the precision graph knows no operator of the engine that uses {name}")
        return precision

    def read_layer(self, layer: Any) -> LayerPrecision:
        mlp = self.read_experts(layer.mlp) if hasattr(layer.mlp, "experts") else self.read_mlp(layer.mlp)
        residual = self.read_residual(layer.input_layernorm)
        return LayerPrecision(
            input_norm=self.read_norm(layer.input_layernorm, residual),
            attention=self.read_post_norm(self.read_attention(layer.self_attn), layer, "post_self_attn_layernorm"),
            post_attention_norm=self.read_norm(layer.post_attention_layernorm, self.read_residual(layer.post_attention_layernorm)),
            mlp=self.read_post_norm(mlp, layer, "post_mlp_layernorm"),
            residual=residual,
        )

    def read_post_norm(self, part: Any, layer: Any, name: str) -> Any:
        """Return attention or MLP with the norm of what it adds to the residual stream, if the layer has one of this name."""
        return replace(part, post_norm=self.read_norm(getattr(layer, name), self.hidden)) if hasattr(layer, name) else part

    def read_residual(self, norm: Any) -> TensorPrecision:
        """Return the format of the residual stream that a norm adds to."""
        dtype = getattr(norm, "override_orig_dtype", None)
        return self.hidden if dtype is None else TensorPrecision(dtype_name(dtype))

    def read_attention(self, attention: Any) -> AttentionPrecision | MLAPrecision:
        if hasattr(attention, "kv_b_proj"):
            return self.read_latent_attention(attention)
        if not hasattr(attention, "qkv_proj"):
            raise ValueError(f"the precision graph does not know the engine's attention {type(attention).__name__}")
        head_norms = {
            name: self.read_norm(getattr(attention, name), self.hidden) for name in ("q_norm", "k_norm") if hasattr(attention, name)
        }
        backend, cache = type(self.runner.attn_backend).__name__, self.read_cache(attention.attn)
        qkv, output = self.read_linear(attention.qkv_proj), self.read_row_parallel(attention.o_proj)
        return AttentionPrecision(qkv, output, self.hidden, cache, detail=backend, rope=_describe_rope(attention), **head_norms)

    def read_latent_attention(self, attention: Any) -> MLAPrecision:
        """Read MLA. SGLang makes w_kc and w_vc from kv_b's blocks, and multiplies with their values, unquantized: on a CPU always
        (`hooks.cpu_mla`), on a GPU for decoded tokens."""
        if getattr(attention, "use_deep_gemm_bmm", False):
            raise ValueError("the engine quantises latents for DeepGEMM (SGLANG_USE_DEEPGEMM_BMM), which the trainer does not")
        fused = getattr(attention, "fused_qkv_a_proj_with_mqa", None)
        cache, absorbed = self.read_cache(attention.attn_mqa, attention.attn_mha), self.runner.device == "cpu"
        kv_b = self.read_linear(attention.kv_b_proj)
        return MLAPrecision(
            q_b=self.read_linear(attention.q_proj if fused is None else attention.q_b_proj),
            kv_a=self.read_linear(attention.kv_a_proj_with_mqa if fused is None else fused),
            kv_a_norm=self.read_norm(attention.kv_a_layernorm, self.hidden),
            kv_b=kv_b
            if attention.w_kc is None
            else replace(kv_b, x=self.hidden if absorbed else cache, detail="absorbed into the attention"),
            output=self.read_row_parallel(attention.o_proj),
            q=self.hidden,
            kv=cache,
            q_a=None if fused is None else self.read_linear(fused),
            q_a_norm=None if fused is None else self.read_norm(attention.q_a_layernorm, self.hidden),
            absorbed=absorbed,
            rope=_describe_rope(attention),
            detail=type(self.runner.attn_backend).__name__,
        )

    def read_cache(self, *attentions: Any) -> TensorPrecision:
        """Return the format of keys and values in the cache. An FP8 cache has a scale for each row of a head (`hooks.cpu_kv_cache`), or
        one for a layer's keys and one for its values (`hooks.kv_cache_scales`); else SGLang's own."""
        kv_cache_scales.check_backend(self.runner.attn_backend)
        self.seen |= {id(scale) for core in attentions for scale in (core.k_scale, core.v_scale) if isinstance(scale, torch.Tensor)}
        pool = self.runner.token_to_kv_pool
        dtype = pool.dtype
        if dtype.itemsize == 1 and (scales := getattr(attentions[0], "kv_scales", None)) is not None:
            self.seen.add(id(scales))
            return layer_format(dtype_name(dtype), scales)
        if dtype.itemsize == 1 and cpu_kv_cache.has_scales(pool):
            return head_format(dtype_name(dtype))
        return TensorPrecision(dtype_name(dtype), "tensor", "fp32") if dtype.itemsize == 1 else TensorPrecision(dtype_name(dtype))

    def read_mlp(self, mlp: Any) -> MLPPrecision:
        return MLPPrecision(self.read_linear(mlp.gate_up_proj), self.read_row_parallel(mlp.down_proj))

    def read_experts(self, moe: Any) -> MoEPrecision:
        gate, experts, shared = moe.gate, moe.experts, getattr(moe, "shared_experts", None)
        fp32_logits = not hasattr(gate, "quant_method") or type(gate.quant_method).__name__ == "Fp32RouterMethod"  # hooks.fp32_router
        logits = TensorPrecision("fp32") if fp32_logits else unquantized_format(gate.weight)
        router = self.read_linear(gate) if hasattr(gate, "quant_method") else self.read_norm(gate, self.hidden)
        gate_up, down = self.read_linear(experts, name="w13_weight"), self.read_row_parallel(experts, name="w2_weight")
        return MoEPrecision(
            router=replace(router, bias=self.read_vector(gate, "e_score_correction_bias")),
            logits=logits,
            experts=MLPPrecision(gate_up, down, count=gate.weight.shape[0]),
            shared=None if shared is None else self.read_mlp(shared),
        )

    def read_row_parallel(self, module: Any, name: str = "weight") -> WeightedOpPrecision:
        """Read a linear layer that tensor-parallel ranks cut by columns, or so the second matrix of all experts."""
        return replace(self.read_linear(module, name=name), by_tree=tree_reduction.is_summed_by_tree(module.quant_method))

    def read_linear(self, module: Any, x: TensorPrecision | None = None, name: str = "weight") -> WeightedOpPrecision:
        """Read a linear layer, an embedding, or by `name` one of the two matrices of all experts, [experts, N, K]. `x`: format of its input
        if it differs from the hidden states."""
        weight, scale = getattr(module, name), _scale(module, name)
        method = type(module.quant_method).__name__
        if method not in _KNOWN_METHODS:
            raise ValueError(f"the precision graph does not know the quantisation method {method}")
        self.seen.add(id(weight))
        bias, detail = self.read_vector(module, "bias"), f"{type(module).__name__}, {method}"
        adapter, _ = (self.read_vector(module, name.removesuffix("weight") + each) for each in NAMES)
        if weight.dtype.itemsize > 1:
            return WeightedOpPrecision(x or self.hidden, unquantized_format(weight), bias, detail, adapter=adapter)
        path = self.names[id(module)]
        if scale is None:
            raise ValueError(f"the engine's {path} is {dtype_name(weight.dtype)} without scales")
        self.seen.add(id(scale))
        dtype, _, scales = self.activations.get(path, "unknown unknown").partition(" ")
        if weight.dtype == torch.int8:
            return WeightedOpPrecision(token_format(dtype), channel_format(weight, scale), bias, detail)
        x = group_format(_activation_group_size(module.quant_method), scales)
        return WeightedOpPrecision(x, block_format(weight, scale), bias, detail, adapter=adapter)

    def read_norm(self, module: Any, x: TensorPrecision) -> WeightedOpPrecision:
        self.seen.add(id(module.weight))
        return WeightedOpPrecision(x, unquantized_format(module.weight), self.read_vector(module, "bias"), type(module).__name__)

    def read_vector(self, module: Any, name: str) -> TensorPrecision | None:
        """Read a bias, or one of an adapter's weights; None if the module has none."""
        bias = getattr(module, name, None)
        if not isinstance(bias, torch.Tensor):
            return None
        self.seen.add(id(bias))
        return unquantized_format(bias)


def _scale(module: Any, weight: str) -> torch.Tensor | None:
    """Return the scales of a module's FP8 or INT8 weight, None if it has none."""
    inverse = getattr(module, f"{weight}_scale_inv", None)
    return getattr(module, f"{weight}_scale", None) if inverse is None else inverse


def _activation_group_size(method: Any) -> int | None:
    """Return how many activations share a scale: the block width that SGLang passes to its kernel, None without blocks."""
    block_size = getattr(method, "weight_block_size", None) or getattr(method.quant_config, "weight_block_size", None)
    return block_size[1] if block_size else None


def _describe_rope(attention: Any) -> str:
    """Return where SGLang's rotary embedding rounds: once in its kernel for heads of 64, 128, 256 and 512 numbers on a GPU."""
    rotary = getattr(attention, "rotary_emb", None)
    in_fp32 = rotary is not None and rotary.cos_sin_cache.is_cuda and not getattr(rotary, "use_fallback_kernel", True)
    return "FP32, rounded once" if in_fp32 else "cos, sin and products rounded"
