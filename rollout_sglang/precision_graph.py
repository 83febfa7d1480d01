"""Reads the rollout graph inside a scheduler process from the live SGLang model: dtypes and shapes of weights and scales, and the methods
that
use them, but no values, because they are made up before the first sync. An unknown quantization method is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.precision.graph.decoder import DECAY, LayerPrecision, Operator
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision
from megatron_rl.precision.graph.reader import FP32, Reader, block_format, channel_format, dtype_name, unquantized_format
from parallel.adapters import NAMES
from rollout_sglang.hooks import e4m3_cache, tree_reduction

_KNOWN_METHODS = (
    *("Fp8LinearMethod", "Fp8MoEMethod", "W8A8Int8LinearMethod", "W8A8Int8MoEMethod", "Fp32RouterMethod"),
    *("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"),
)


def read_rank_graph(runner: Any, activations: Mapping[str, str]) -> PrecisionGraph:
    """Return the graph of the model of SGLang's ModelRunner. `activations`: formats of the inputs by module. Raise ValueError for an
    unknown module or format, RunError for a parameter that no operator uses."""
    return _Reader(runner, activations).read_graph()


class _Reader(Reader):
    side = "sglang"

    def __init__(self, runner: Any, activations: Mapping[str, str]) -> None:
        super().__init__()
        self.model, self.runner, self.activations = runner.model, runner, activations
        self.names = {id(module): name for name, module in self.model.named_modules()}
        self.hidden = unquantized_format(self.model.model.embed_tokens.weight)

    def read_graph(self) -> PrecisionGraph:
        model, stack = self.model, self.model.model
        fp32_head = getattr(model.logits_processor, "use_fp32_lm_head", False)
        ends = {
            "embedding": self.read_linear(stack.embed_tokens).with_inputs(x=None),
            "norm": self.read_weighted(stack.norm, self.read_residual(stack.norm)),
            "lm_head": self.read_linear(model.lm_head, FP32 if fp32_head else unquantized_format(model.lm_head.weight)),
            "logprobs": Operator({"x": FP32 if fp32_head else self.hidden}),
        }
        return self.connect({number: self.read_layer(layer) for number, layer in enumerate(stack.layers)}, ends)

    def read_layer(self, layer: Any) -> LayerPrecision:
        mlp, operators, logits = layer.mlp, self.read_modules(layer), None
        if hasattr(mlp, "experts"):
            operators |= self.read_experts(mlp)
            method = type(getattr(mlp.gate, "quant_method", None)).__name__
            logits = FP32 if method in ("NoneType", "Fp32RouterMethod") else unquantized_format(mlp.gate.weight)  # hooks.fp32_router
        residual = self.read_residual(layer.input_layernorm)
        if (delta_net := getattr(layer, "linear_attn", None)) is not None:
            return LayerPrecision(operators | self.read_delta(delta_net), residual, None, logits=logits)
        attention = getattr(layer, "self_attn", layer)  # in hybrid families, the layer owns the parts of its attention
        if hasattr(attention, "kv_b_proj"):
            operators = self.absorb_latents(attention, operators)
        elif not hasattr(attention, "qkv_proj"):
            raise ValueError(f"the precision graph does not know the engine's attention {type(attention).__name__}")
        cache, backend = self.read_cache(attention), type(e4m3_cache.get_attention_backend(self.runner.attn_backend)).__name__
        return LayerPrecision(operators, residual, cache, backend, logits, getattr(attention, "attn_output_gate", False))

    def read_delta(self, delta_net: Any) -> dict[str, Operator]:
        """Read the convolution and the delta rule, whose windows and states lie in a pool between two passes."""
        if not hasattr(delta_net, "in_proj_qkvz"):
            raise ValueError(f"the precision graph does not know the engine's attention {type(delta_net).__name__}")
        pool = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        windows, states = (TensorPrecision(dtype_name(tensor.dtype)) for tensor in (pool.conv[0], pool.temporal))
        rule = Operator({"x": self.hidden, "gates": self.hidden, "state": states}, type(delta_net).__name__)
        decay = {name: self.read_tensor(getattr(delta_net, name)) for name in DECAY}
        return {"attention.conv": self.read_weighted(delta_net.conv1d, windows), "attention.delta": rule.with_inputs(**decay)}

    def read_residual(self, norm: Any) -> TensorPrecision:
        dtype = getattr(norm, "override_orig_dtype", None)
        return self.hidden if dtype is None else TensorPrecision(dtype_name(dtype))

    def absorb_latents(self, attention: Any, operators: dict[str, Operator]) -> dict[str, Operator]:
        """Return MLA's operators. SGLang multiplies with unquantized w_kc and w_vc: always on a CPU, for decoded tokens on a GPU."""
        if getattr(attention, "use_deep_gemm_bmm", False):
            raise ValueError("the engine quantizes latents for DeepGEMM (SGLANG_USE_DEEPGEMM_BMM), which the trainer does not")
        up, absorbed = operators.pop("attention.kv_b"), self.runner.device == "cpu"
        if attention.w_kc is not None:
            up = replace(up, detail="absorbed into the attention").with_inputs(x=self.hidden if absorbed else self.read_cache(attention))
        return operators | dict.fromkeys(("attention.kv_b.k", "attention.kv_b.v") if absorbed else ("attention.kv_b",), up)

    def read_cache(self, attention: Any) -> TensorPrecision:
        """Return the format of keys and values in the cache. An FP8 cache has scales by row or layer (`hooks.e4m3_cache`), or SGLang's
        own."""
        e4m3_cache.check_backend(self.runner.attn_backend)
        attentions = [attention.attn_mqa, attention.attn_mha] if hasattr(attention, "kv_b_proj") else [attention.attn]
        for scale in (scale for core in attentions for scale in (core.k_scale, core.v_scale)):
            self.read_tensor(scale)
        pool, scales = e4m3_cache.get_attention_pool(self.runner.token_to_kv_pool), getattr(attentions[0], "kv_scales", None)
        dtype = dtype_name(pool.dtype)
        if pool.dtype.itemsize > 1:
            return TensorPrecision(dtype)
        if scales is not None:
            self.read_tensor(scales)
            return TensorPrecision(dtype, "layer", "pow2")
        return TensorPrecision(dtype, "head", "pow2") if e4m3_cache.has_scales(pool) else TensorPrecision(dtype, "tensor", "fp32")

    def read_experts(self, moe: Any) -> dict[str, Operator]:
        """Read the router and the routed experts, whose weights are matrices `[experts, N, K]` of one module."""
        gate, experts = moe.gate, moe.experts
        router = self.read_linear(gate) if hasattr(gate, "quant_method") else self.read_weighted(gate)
        sides = {"gate_up": "w13_weight", "down": "w2_weight"}
        operators = {f"mlp.experts.{side}": self.read_linear(experts, weight_name=weight) for side, weight in sides.items()}
        operators = {name: replace(operator, count=gate.weight.shape[0]) for name, operator in operators.items()}
        if (score := getattr(moe, "shared_expert_gate", None)) is not None:
            operators["mlp.shared_experts.score"] = self.read_weighted(score)
        return {"mlp.router": router.with_inputs(bias=self.read_tensor(getattr(gate, "e_score_correction_bias", None))), **operators}

    def read_linear(self, module: Any, x: TensorPrecision | None = None, weight_name: str = "weight") -> Operator:
        """Read a linear layer or an embedding."""
        weight, method, path = getattr(module, weight_name), type(module.quant_method).__name__, self.names[id(module)]
        if method not in _KNOWN_METHODS:
            raise ValueError(f"the precision graph does not know the quantization method {method}")
        by_tree = weight_name == "w2_weight" or path.endswith(("o_proj", "out_proj", "down_proj"))  # ranks hold columns of these weights
        by_tree = by_tree and tree_reduction.is_summed_by_tree(module.quant_method)
        operator = replace(self.read_weighted(module, x, weight), detail=f"{type(module).__name__}, {method}", by_tree=by_tree)
        adapter, _ = (self.read_tensor(getattr(module, weight_name.removesuffix("weight") + name, None)) for name in NAMES)
        if weight.dtype.itemsize == 1:
            scales = (getattr(module, f"{weight_name}_{suffix}", None) for suffix in ("scale_inv", "scale"))
            if (scale := next((scale for scale in scales if scale is not None), None)) is None:
                raise ValueError(f"the engine's {path} is {dtype_name(weight.dtype)} without scales")
            self.read_tensor(scale)
            dtype, _, activation_scales = self.activations.get(path, "unknown unknown").partition(" ")
            if weight.dtype == torch.int8:
                return operator.with_inputs(x=TensorPrecision(dtype, "token", "fp32"), weight=channel_format(weight, scale))
            scheme = module.quant_method
            blocks = getattr(scheme, "weight_block_size", None) or getattr(scheme.quant_config, "weight_block_size", None)
            group = f"1x{blocks[1]}" if blocks else "tensor"  # activations that share a scale, as SGLang tells its kernel
            promised = "pow2" if scheme.quant_config.scale_fmt == "ue8m0" else "fp32"  # by the engine's config.json
            operator = operator.with_inputs(
                x=TensorPrecision("e4m3", group, activation_scales), weight=block_format(weight, scale, promised)
            )
        return operator.with_inputs(**dict.fromkeys(NAMES, adapter))
