"""Reads the rollout graph inside a scheduler process from the live SGLang model: dtypes and shapes of weights and scales, and the methods
that use them. An unknown quantization method is refused. The values of scales are made up before the first sync, so they are not part of
the graph: `check_scale_values` reads them after every sync."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.precision.graph.decoder import DECAY, LayerPrecision, Operator
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision
from megatron_rl.precision.graph.kernels import Kernel
from megatron_rl.precision.graph.reader import FP32, Reader, block_format, channel_format, check_scales, dtype_name, unquantized_format
from parallel.adapters import NAMES
from rollout_sglang import kernel_identity
from rollout_sglang.hooks import e4m3_cache, no_positions, tree_reduction

_KNOWN_METHODS = (
    *("Fp8LinearMethod", "Fp8MoEMethod", "W8A8Int8LinearMethod", "W8A8Int8MoEMethod", "Fp32RouterMethod"),
    *("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"),
)
_SCALES = tuple(f"{weight}_{suffix}" for weight in ("weight", "w13_weight", "w2_weight") for suffix in ("scale_inv", "scale"))


def read_rank_graph(runner: Any, activations: Mapping[str, str]) -> PrecisionGraph:
    """Return the graph of the model of SGLang's ModelRunner. `activations`: formats of the inputs by module. Raise ValueError for an
    unknown module or format, RunError for a parameter that no operator uses."""
    return _Reader(runner, activations).read_graph()


def check_scale_values(model: Any) -> None:
    """Raise ValueError, by name, if the scales of a live weight do not have the format that the rollout graph states: powers of two, if the
    engine's config.json promises them, and positive numbers always."""
    scales: dict[str, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        for name in _SCALES if method is not None else ():
            scale = getattr(module, name, None)
            if isinstance(scale, torch.Tensor) and scale.dtype == torch.float32:
                scales[_promised_scales(method)].append((f"{path}.{name}", scale.detach()))
        if (cache := getattr(module, "kv_scales", None)) is not None:
            scales["pow2"].append((f"{path}.kv_scales", cache.detach()))
    for promised, named in scales.items():
        if check_scales(torch.cat([scale.reshape(-1) for _, scale in named]), promised) != promised:
            name, found = next((name, found) for name, scale in named if (found := check_scales(scale, promised)) != promised)
            raise ValueError(f"{name} holds scales that are {found}, but the precision graph says {promised}")


def _promised_scales(method: Any) -> str:
    """Return the format of scales that the engine's config.json promises for a layer with this quantization method."""
    return "pow2" if getattr(getattr(method, "quant_config", None), "scale_fmt", None) == "ue8m0" else "fp32"


def _get_router(moe: Any) -> Any:
    return moe.gate if hasattr(moe, "gate") else moe.router


_BIAS = "e_score_correction_bias"  # of the router


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
        logits, scores = kernel_identity.identify_ends(model, self.runner)
        head = self.read_linear(model.lm_head, FP32 if fp32_head else unquantized_format(model.lm_head.weight))
        ends = {
            "embedding": self.read_linear(stack.embed_tokens).with_inputs(x=None),
            "norm": replace(self.read_weighted(stack.norm, self.read_residual(stack.norm)), kernel=self.identify("norm", stack.norm)),
            "lm_head": replace(head, kernel=logits),
            "logprobs": Operator({"x": FP32 if fp32_head else self.hidden}, kernel=scores),
        }
        return self.connect({number: self.read_layer(layer) for number, layer in enumerate(stack.layers)}, ends)

    def read_layer(self, layer: Any) -> LayerPrecision:
        mlp, operators, logits = kernel_identity.get_mlp(layer), self.read_modules(layer), None
        if hasattr(mlp, "experts"):
            operators |= self.read_experts(mlp)
            gate = _get_router(mlp)
            method = type(getattr(gate, "quant_method", None)).__name__
            logits = FP32 if method in ("NoneType", "Fp32RouterMethod") else unquantized_format(gate.weight)  # hooks.fp32_router
        residual = self.read_residual(layer.input_layernorm)
        backend = e4m3_cache.get_attention_backend(self.runner.attn_backend)
        by_tree, dtype = tree_reduction.sums_by_tree(), self.model.model.embed_tokens.weight.dtype
        kernels = kernel_identity.identify_rest(layer, self.runner.attn_backend, by_tree, dtype)
        kernels["attention"] = kernel_identity.identify_attention(backend)
        if (delta_net := getattr(layer, "linear_attn", None)) is not None:
            return LayerPrecision(operators | self.read_delta(delta_net), residual, None, logits=logits, kernels=kernels)
        attention = getattr(layer, "self_attn", layer)  # in hybrid families, the layer owns the parts of its attention
        if hasattr(attention, "kv_b_proj"):
            operators = self.absorb_latents(attention, operators)
        elif not hasattr(attention, "qkv_proj"):
            raise ValueError(f"the precision graph does not know the engine's attention {type(attention).__name__}")
        cache, core = self.read_cache(attention), type(backend).__name__
        sinks = self.read_tensor(getattr(attention, "sinks", None))
        beside = None if sinks is None else Operator({"sinks": sinks})
        rotates, gated = not isinstance(attention.rotary_emb, no_positions.Unrotated), getattr(attention, "attn_output_gate", False)
        return LayerPrecision(operators, residual, cache, core, logits, rotates, gated, beside, kernels)

    def identify(self, kind: str, module: Any) -> Kernel:
        return kernel_identity.identify_norm(kind, module)

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
            if absorbed:
                up = replace(up, kernel=kernel_identity.identify_live(type(attention).forward_absorb_core))
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
        gate, experts = _get_router(moe), moe.experts
        router = self.read_linear(gate) if hasattr(gate, "quant_method") else self.read_weighted(gate)
        router = router if router.kernel else replace(router, kernel=kernel_identity.identify_live(kernel_identity.find_method(gate)))
        sides = {"gate_up": "w13_weight", "down": "w2_weight"}
        operators = {f"mlp.experts.{side}": self.read_linear(experts, weight_name=weight) for side, weight in sides.items()}
        for side, weight in sides.items():
            operator = operators[f"mlp.experts.{side}"].with_inputs(bias=self.read_tensor(getattr(experts, f"{weight}_bias", None)))
            operators[f"mlp.experts.{side}"] = replace(operator, count=gate.weight.shape[0])
        if (score := getattr(moe, "shared_expert_gate", None)) is not None:
            operators["mlp.shared_experts.score"] = replace(self.read_weighted(score), kernel=kernel_identity.identify_score())
        if (correction := self.read_tensor(getattr(gate, _BIAS, getattr(moe, _BIAS, None)))) is not None:
            router = router.with_inputs(bias=correction)
        return {"mlp.router": router, **operators}

    def read_linear(self, module: Any, x: TensorPrecision | None = None, weight_name: str = "weight") -> Operator:
        """Read a linear layer or an embedding."""
        weight, method, path = getattr(module, weight_name), type(module.quant_method).__name__, self.names[id(module)]
        if method not in _KNOWN_METHODS:
            raise ValueError(f"the precision graph does not know the quantization method {method}")
        by_tree = weight_name == "w2_weight" or path.endswith(("o_proj", "out_proj", "down_proj"))  # ranks hold columns of these weights
        by_tree = by_tree and tree_reduction.is_summed_by_tree(module.quant_method)
        operator = replace(self.read_weighted(module, x, weight), detail=f"{type(module).__name__}, {method}", by_tree=by_tree)
        kernel = kernel_identity.identify_linear(module, by_tree)
        if type(module).__name__ == "RowParallelLinear":
            kernel = kernel_identity.identify_row_parallel(module, kernel)
        operator = replace(operator, kernel=kernel)
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
            weight_format = block_format(weight, scale, _promised_scales(scheme))
            operator = operator.with_inputs(x=TensorPrecision("e4m3", group, activation_scales), weight=weight_format)
        return operator.with_inputs(**dict.fromkeys(NAMES, adapter))
