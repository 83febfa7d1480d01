"""Reads the rollout graph inside a scheduler process from the live SGLang model: weights, scales, and the methods that use them.

A parameter that no known operator uses, or an unknown quantization method, is refused: an incomplete graph proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.precision.graph.decoder import DecoderPrecision, LayerPrecision, Operator, decoder_graph
from megatron_rl.precision.graph.formats import block_format, channel_format, dtype_name, scale_format, unquantized_format
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision
from parallel.adapters import NAMES
from rollout_sglang.hooks import cpu_kv_cache, kv_cache_scales, tree_reduction

FP32 = TensorPrecision("fp32")
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
_LINEARS = {"qkv": "qkv_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj", "output": "o_proj"}
"""Operator of an attention -> its module."""
_NORMS = {"q_norm": "q_norm", "k_norm": "k_norm", "q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm"}


def read_rank_graph(runner: Any, activations: Mapping[str, str]) -> PrecisionGraph:
    """Return the graph of the model that this rank serves. Raise ValueError for an unknown module.

    Args:
        runner: SGLang's ModelRunner, which holds the model, the attention backend and the cache.
        activations: Maps a module's name to the format of its inputs.
    """
    return decoder_graph(_Reader(runner, activations).read_decoder())


class _Reader:
    def __init__(self, runner: Any, activations: Mapping[str, str]) -> None:
        model = runner.model
        self.model, self.runner, self.activations = model, runner, activations
        self.names = {id(module): name for name, module in model.named_modules()}
        self.seen: set[int] = set()
        self.hidden = unquantized_format(model.model.embed_tokens.weight)

    def read_decoder(self) -> DecoderPrecision:
        model, stack = self.model, self.model.model
        fp32_head = getattr(model.logits_processor, "use_fp32_lm_head", False)
        layers = {number: self.read_layer(layer) for number, layer in enumerate(stack.layers)}
        ends = {
            "embedding": self.read_linear(stack.embed_tokens).with_inputs(x=None),
            "norm": self.read_norm(stack.norm, self.read_residual(stack.norm)),
            "lm_head": self.read_linear(model.lm_head, FP32 if fp32_head else unquantized_format(model.lm_head.weight)),
            "logprobs": Operator({"x": FP32 if fp32_head else self.hidden}),
        }
        for name, parameter in model.named_parameters():
            if id(parameter) not in self.seen:
                raise ValueError(f"the precision graph has no operator that uses the engine's parameter {name}")
        return DecoderPrecision(self.hidden, layers, ends)

    def read_layer(self, layer: Any) -> LayerPrecision:
        attention, mlp = layer.self_attn, layer.mlp
        operators = self.read_latent_attention(attention) if hasattr(attention, "kv_b_proj") else self.read_attention(attention)
        operators |= self.read_experts(mlp) if hasattr(mlp, "experts") else self.read_mlp("mlp", mlp)
        for name, norm in (("input_norm", layer.input_layernorm), ("post_attention_norm", layer.post_attention_layernorm)):
            operators[name] = self.read_norm(norm, self.read_residual(norm))
        for name, module in (("attention.post_norm", "post_self_attn_layernorm"), ("mlp.post_norm", "post_mlp_layernorm")):
            if hasattr(layer, module):
                operators[name] = self.read_norm(getattr(layer, module), self.hidden)
        return LayerPrecision(
            operators,
            self.read_residual(layer.input_layernorm),
            self.read_cache(attention),
            attention=type(self.runner.attn_backend).__name__,
            rope=_describe_rope(attention),
            logits=self.read_logits(mlp.gate) if hasattr(mlp, "experts") else None,
        )

    def read_residual(self, norm: Any) -> TensorPrecision:
        """Return the format of the residual stream that a norm adds to."""
        dtype = getattr(norm, "override_orig_dtype", None)
        return self.hidden if dtype is None else TensorPrecision(dtype_name(dtype))

    def read_attention(self, attention: Any) -> dict[str, Operator]:
        if not hasattr(attention, "qkv_proj") and not hasattr(attention, "kv_b_proj"):
            raise ValueError(f"the precision graph does not know the engine's attention {type(attention).__name__}")
        linears = {name: getattr(attention, module, None) for name, module in _LINEARS.items()}
        norms = {name: getattr(attention, module) for name, module in _NORMS.items() if hasattr(attention, module)}
        operators = {f"attention.{name}": self.read_linear(layer) for name, layer in linears.items() if layer is not None}
        return operators | {f"attention.{name}": self.read_norm(norm, self.hidden) for name, norm in norms.items()}

    def read_latent_attention(self, attention: Any) -> dict[str, Operator]:
        """Read MLA. SGLang computes w_kc and w_vc from the blocks of kv_b and multiplies with their unquantized values: always on a CPU
        (`hooks.cpu_mla`), for decoded tokens on a GPU."""
        if getattr(attention, "use_deep_gemm_bmm", False):
            raise ValueError("the engine quantizes latents for DeepGEMM (SGLANG_USE_DEEPGEMM_BMM), which the trainer does not")
        operators = self.read_attention(attention)
        fused, absorbed = getattr(attention, "fused_qkv_a_proj_with_mqa", None), self.runner.device == "cpu"
        if fused is None:
            operators["attention.q_b"] = self.read_linear(attention.q_proj)
        else:
            operators["attention.q_a"] = operators["attention.kv_a"] = self.read_linear(fused)
        if attention.w_kc is not None:
            x = self.hidden if absorbed else self.read_cache(attention)
            operators["attention.kv_b"] = replace(operators["attention.kv_b"], detail="absorbed into the attention").with_inputs(x=x)
        if absorbed:
            operators["attention.kv_b.k"] = operators["attention.kv_b.v"] = operators.pop("attention.kv_b")
        return operators

    def read_cache(self, attention: Any) -> TensorPrecision:
        """Return the format of keys and values in the cache. An FP8 cache has a scale for each row of a head (`hooks.cpu_kv_cache`), one
        for a layer's keys and one for its values (`hooks.kv_cache_scales`), or SGLang's own scale."""
        kv_cache_scales.check_backend(self.runner.attn_backend)
        attentions = [attention.attn_mqa, attention.attn_mha] if hasattr(attention, "kv_b_proj") else [attention.attn]
        self.seen |= {id(scale) for core in attentions for scale in (core.k_scale, core.v_scale) if isinstance(scale, torch.Tensor)}
        pool = self.runner.token_to_kv_pool
        dtype = dtype_name(pool.dtype)
        if pool.dtype.itemsize > 1:
            return TensorPrecision(dtype)
        if (scales := getattr(attentions[0], "kv_scales", None)) is not None:
            self.seen.add(id(scales))
            return TensorPrecision(dtype, "layer", scale_format(scales))
        return TensorPrecision(dtype, "head", "pow2") if cpu_kv_cache.has_scales(pool) else TensorPrecision(dtype, "tensor", "fp32")

    def read_mlp(self, name: str, mlp: Any) -> dict[str, Operator]:
        return {f"{name}.gate_up": self.read_linear(mlp.gate_up_proj), f"{name}.down": self.read_linear(mlp.down_proj)}

    def read_logits(self, gate: Any) -> TensorPrecision:
        in_fp32 = not hasattr(gate, "quant_method") or type(gate.quant_method).__name__ == "Fp32RouterMethod"  # hooks.fp32_router
        return FP32 if in_fp32 else unquantized_format(gate.weight)

    def read_experts(self, moe: Any) -> dict[str, Operator]:
        gate, shared, count = moe.gate, getattr(moe, "shared_experts", None), moe.gate.weight.shape[0]
        router = self.read_linear(gate) if hasattr(gate, "quant_method") else self.read_norm(gate, self.hidden)
        sides = {"mlp.experts.gate_up": "w13_weight", "mlp.experts.down": "w2_weight"}
        return {
            "mlp.router": router.with_inputs(bias=self.read_vector(gate, "e_score_correction_bias")),
            **{name: replace(self.read_linear(moe.experts, name=weight), count=count) for name, weight in sides.items()},
            **({} if shared is None else self.read_mlp("mlp.shared_experts", shared)),
        }

    def read_linear(self, module: Any, x: TensorPrecision | None = None, name: str = "weight") -> Operator:
        """Read a linear layer, an embedding, or one of the two matrices of all experts, `[experts, N, K]`.

        Args:
            x: Format of the input, if it differs from the hidden states.
            name: Name of the weight in the module.
        """
        weight, method, path = getattr(module, name), type(module.quant_method).__name__, self.names[id(module)]
        scales = (getattr(module, f"{name}_{suffix}", None) for suffix in ("scale_inv", "scale"))
        scale: Any = next((scale for scale in scales if scale is not None), None)
        if method not in _KNOWN_METHODS:
            raise ValueError(f"the precision graph does not know the quantization method {method}")
        if weight.dtype.itemsize == 1 and scale is None:
            raise ValueError(f"the engine's {path} is {dtype_name(weight.dtype)} without scales")
        self.seen |= {id(weight), id(scale)} if weight.dtype.itemsize == 1 else {id(weight)}
        by_tree = name == "w2_weight" or path.endswith(("o_proj", "down_proj"))  # ranks hold columns of these weights
        by_tree = by_tree and tree_reduction.is_summed_by_tree(module.quant_method)
        dtype, _, activation_scales = self.activations.get(path, "unknown unknown").partition(" ")
        adapter, _ = (self.read_vector(module, name.removesuffix("weight") + each) for each in NAMES)
        if weight.dtype.itemsize > 1:
            x, format = x or self.hidden, unquantized_format(weight)
        elif weight.dtype == torch.int8:
            x, format, adapter = TensorPrecision(dtype, "token", "fp32"), channel_format(weight, scale), None
        else:
            group = _activation_group_size(module.quant_method)
            x, format = TensorPrecision("e4m3", f"1x{group}" if group else "tensor", activation_scales), block_format(weight, scale)
        operator = Operator({"x": x, "weight": format}, f"{type(module).__name__}, {method}", by_tree=by_tree)
        return operator.with_inputs(bias=self.read_vector(module, "bias"), **dict.fromkeys(NAMES, adapter))

    def read_norm(self, module: Any, x: TensorPrecision) -> Operator:
        self.seen.add(id(module.weight))
        operator = Operator({"x": x, "weight": unquantized_format(module.weight)}, type(module).__name__)
        return operator.with_inputs(bias=self.read_vector(module, "bias"))

    def read_vector(self, module: Any, name: str) -> TensorPrecision | None:
        """Read a bias or a weight of an adapter. Return None if the module has none."""
        if not isinstance(tensor := getattr(module, name, None), torch.Tensor):
            return None
        self.seen.add(id(tensor))
        return unquantized_format(tensor)


def _activation_group_size(method: Any) -> int | None:
    """Return how many activations share a scale: the block width that SGLang passes to its kernel, or None without blocks."""
    block_size = getattr(method, "weight_block_size", None) or getattr(method.quant_config, "weight_block_size", None)
    return block_size[1] if block_size else None


def _describe_rope(attention: Any) -> str:
    """Return where SGLang's rotary embedding rounds: once in its GPU kernel for heads of 64, 128, 256 and 512 numbers."""
    rotary = getattr(attention, "rotary_emb", None)
    in_fp32 = rotary is not None and rotary.cos_sin_cache.is_cuda and not getattr(rotary, "use_fallback_kernel", True)
    return "FP32, rounded once" if in_fp32 else "cos, sin and products rounded"
