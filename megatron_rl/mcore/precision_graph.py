"""Reads the training graph from the live Megatron model: from the blocks and classes of its modules, not from the configuration. A module
of an unknown class is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_rl.errors import RunError
from megatron_rl.kernels.experts.backends import make_grouped_backend
from megatron_rl.mcore import kernel_identity
from megatron_rl.mcore.layers.attention.gated_delta_net import GatedDeltaNetLayer
from megatron_rl.mcore.layers.attention.mla import AbsorbedLatentAttention
from megatron_rl.mcore.layers.linear.output_layer import ValueHead
from megatron_rl.mcore.layers.linear.row_parallel import RankSum, TreeRowParallelLinear
from megatron_rl.precision.graph.decoder import DECAY, Gradients, LayerPrecision, Operator
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision, merge_graphs
from megatron_rl.precision.graph.kernels import Kernel, in_parts
from megatron_rl.precision.graph.reader import FP32, Reader, block_format, check_scales, dtype_name, unquantized_format
from parallel.adapters import NAMES
from parallel.mtp_layers import MEGATRON_PREFIX


def read_rank_graph(model: GPTModel | Sequence[GPTModel]) -> PrecisionGraph:
    """Return the graph of this rank's model, or of the chunks of its pipeline stage. Raise RunError for an unknown module."""
    chunks = model if isinstance(model, Sequence) else [model]
    return merge_graphs(_Reader(chunk).read_graph() for chunk in chunks)


class _Reader(Reader):
    side = "megatron"
    skipped = (MEGATRON_PREFIX,)

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.model = model
        embedding = getattr(model, "embedding", None)
        dtype = model.config.pipeline_dtype if embedding is None else embedding.word_embeddings.weight.dtype
        self.hidden = TensorPrecision(dtype_name(dtype))
        self.residual = FP32 if model.config.fp32_residual_connection else self.hidden
        self.on_gpu = next(model.parameters()).is_cuda

    def read_graph(self) -> PrecisionGraph:
        model, ends, on_gpu = self.model, {}, self.on_gpu
        if (embedding := getattr(model, "embedding", None)) is not None:
            ends["embedding"] = replace(self.read_weighted(embedding.word_embeddings).with_inputs(x=None), kernel=kernel_identity.EMBEDDING)
        if (head := getattr(model, "output_layer", None)) is not None:
            norm = model.decoder.final_layernorm
            ends["norm"] = replace(self.read_weighted(norm, self.residual), kernel=self.identify("norm", norm))
            if isinstance(head, ValueHead):
                ends |= {"value_head": self.read_weighted(head), "values": Operator({"x": FP32})}
            else:
                scores = Operator({"x": self.hidden}, kernel=kernel_identity.identify_scores(on_gpu))
                ends |= {"lm_head": self.read_lm_head(head), "logprobs": scores}
        return self.connect({layer.layer_number - 1: self.read_layer(layer) for layer in model.decoder.layers}, ends)

    def read_layer(self, layer: Any) -> LayerPrecision:
        attention, mlp = _require_class(layer.self_attention, SelfAttention, MLASelfAttention, GatedDeltaNetLayer), layer.mlp
        operators, logits = self.read_modules(layer), None
        if isinstance(attention, MLASelfAttention) and "attention.q_norm" in operators:
            operators["attention.q_a_norm"] = operators.pop("attention.q_norm")
        if isinstance(attention, AbsorbedLatentAttention):
            up = replace(operators.pop("attention.kv_b"), kernel=kernel_identity.HEADS)
            operators["attention.kv_b.k"] = operators["attention.kv_b.v"] = up
        if isinstance(_require_class(mlp, MLP, MoELayer), MoELayer):
            logits = TensorPrecision(mlp.router.config.moe_router_dtype or self.hidden.dtype)
            operators |= self.read_experts(mlp)
        kernels = kernel_identity.identify_rest(layer, self.model, self.on_gpu)
        if isinstance(attention, GatedDeltaNetLayer):
            return LayerPrecision(operators | self.read_delta(attention), self.residual, None, logits=logits, kernels=kernels)
        cache, core = self.read_cache(attention.core_attention), type(attention.core_attention).__name__
        sinks = attention.core_attention.softmax_offset
        beside = None if sinks is None else self.read_sinks(sinks)
        gated = attention.config.attention_output_gate
        rotates = getattr(attention, "rotates", True)
        return LayerPrecision(operators, self.residual, cache, core, logits, rotates, gated, beside, kernels)

    def identify(self, kind: str, module: Any) -> Kernel:
        return kernel_identity.identify_norm(kind, module, self.on_gpu)

    def read_sinks(self, sinks: Any) -> Operator:
        format, hidden = self.read_tensor(sinks), self.hidden
        assert format is not None
        trained = ("sinks",) if sinks.requires_grad else ()
        return Operator({"sinks": format}, gradients=Gradients(hidden, format, hidden, hidden, *_gradient_and_master(sinks), trained))

    def read_delta(self, attention: GatedDeltaNetLayer) -> dict[str, Operator]:
        """Read the convolution and the delta rule, whose state is float32 whatever its inputs are (`kernels.gated_delta`)."""
        decay = [getattr(attention, name) for name in DECAY]
        grad, master = _gradient_and_master(decay[0])
        rule = Operator({"x": self.hidden, "gates": self.hidden, "state": FP32}, type(attention).__name__)
        rule = rule.with_inputs(**dict(zip(DECAY, map(self.read_tensor, decay), strict=True)))
        gradients = Gradients(self.hidden, FP32, self.hidden, self.hidden, grad, master, DECAY if decay[0].requires_grad else ())
        return {"attention.conv": self.read_weighted(attention.conv1d), "attention.delta": replace(rule, gradients=gradients)}

    def read_residual(self, norm: Any) -> TensorPrecision:
        return self.residual

    def read_cache(self, core: Any) -> TensorPrecision:
        """Return the format of keys and values as the attention reads them."""
        if not core.quantizes_kv:
            return self.hidden
        by_head = core.kv_scales is None
        return (
            TensorPrecision("e4m3", "head", "pow2") if by_head else TensorPrecision("e4m3", "layer", check_scales(core.kv_scales, "pow2"))
        )

    def read_experts(self, moe: Any) -> dict[str, Operator]:
        """Read the router, with its bias, a buffer, and the routed experts as one."""
        router, experts = moe.router, getattr(moe.experts, "local_experts", None)
        if experts is None:
            raise RunError(f"the precision graph does not know the trainer's experts {type(moe.experts).__name__}")
        product = kernel_identity.identify_linear(router, False, self.on_gpu)
        operators = {"mlp.router": replace(self.read_weighted(router), kernel=product)}
        if (correction := self.read_tensor(getattr(router, "expert_bias", None))) is not None:
            operators["mlp.router"] = operators["mlp.router"].with_inputs(bias=correction)
        for side, module in (("gate_up", "linear_fc1"), ("down", "linear_fc2")):
            layers = [getattr(expert, module) for expert in experts]
            operator, *others = (replace(self.read_linear(layer), count=router.weight.shape[0]) for layer in layers)
            if any(other != operator for other in others):
                raise RunError(f"the precision graph: the experts of one layer differ in the precision of {module}")
            if getattr(moe.experts, "runs_grouped", False):  # in one product, whose bits are those of each expert's own
                backend = make_grouped_backend(layers[0].config.linear_backend, layers[0].format)
                operator = replace(operator, detail=f"{type(layers[0]).__name__}, {type(backend).__name__}")
            operators[f"mlp.experts.{side}"] = operator
        if (gate := getattr(moe.shared_experts, "gate_weight", None)) is not None:
            operators["mlp.shared_experts.score"] = replace(self.read_weighted(moe.shared_experts, weight=gate), kernel=product)
        return operators

    def read_linear(self, module: Any) -> Operator:
        """Read a quantized layer by its blocks, another layer by its weight. Transformer Engine's own layers hide how they quantize."""
        if not type(module).__module__.startswith("megatron_rl."):
            _require_class(module, ColumnParallelLinear, RowParallelLinear)
        operator, blocks = self.read_weighted(module), module.blocks
        gradients = operator.gradients
        assert gradients is not None
        if blocks is not None:
            scales = check_scales(blocks.scale, module.format.scale_format)
            weight, x, tokens = block_format(blocks.data, blocks.scale, scales), self.hidden, self.hidden
            if module.quantizes_input:
                group, scale = module.format.block[1], module.format.scale_format  # a group of the input is as long as a block is wide
                x = TensorPrecision(weight.dtype, f"1x{group}", scale)
                tokens = TensorPrecision(weight.dtype, f"{group}x1", scale)  # WGrad contracts over tokens: columns of x, rows of dy^T
            gradients = replace(gradients, dy=x, weight=weight, dy_wgrad=x, x=tokens, master=FP32)
            detail = f"{type(module).__name__}, {type(module.backend).__name__}"
            operator = replace(operator.with_inputs(x=x, weight=weight), detail=detail)
        if hasattr(module, "lora_A"):
            hidden, (grad, master) = self.hidden, _gradient_and_master(module.lora_A)
            operator = operator.with_inputs(**{name: self.read_tensor(getattr(module, name)) for name in NAMES})
            gradients = replace(gradients, dy_wgrad=hidden, x=hidden, grad=grad, master=master, trained=NAMES)
        by_tree = isinstance(module, TreeRowParallelLinear) and module.config.sums_by_tree
        kernel = kernel_identity.identify_linear(module, by_tree, self.on_gpu)
        if isinstance(module, TreeRowParallelLinear) and isinstance(sums := module.choose_sum(module.weight.dtype), RankSum):
            kernel = in_parts(kernel, sums.slices * sums.group.size())
        return replace(operator, gradients=gradients, by_tree=by_tree, kernel=kernel)

    def read_weighted(self, module: Any, x: TensorPrecision | None = None, weight: Any = None) -> Operator:
        operator = super().read_weighted(module, x, weight)
        x, weight = operator.inputs["x"], module.weight if weight is None else weight
        trained = ("weight", "bias") if weight.requires_grad else ()
        return replace(operator, gradients=Gradients(x, operator.inputs["weight"], x, x, *_gradient_and_master(weight), trained))

    def read_lm_head(self, head: Any) -> Operator:
        """Read the output layer, which has no weight of its own if embeddings are tied."""
        if head.weight is not None:
            return self.read_linear(head)
        operator = self.read_weighted(head, weight=self.model.shared_embedding_or_output_weight())
        assert operator.gradients is not None
        gradients = replace(operator.gradients, master=operator.inputs["weight"])  # the embedding has the master
        kernel = kernel_identity.identify_linear(head, False, self.on_gpu)
        return replace(operator, detail=f"{operator.detail}, tied", gradients=gradients, kernel=kernel)


def _gradient_and_master(weight: Any) -> tuple[TensorPrecision, TensorPrecision]:
    """Return the formats of the accumulated gradient (Megatron's buffer, or autograd's own) and of what the optimizer steps (the FP32 copy
    of a 16-bit weight, which may be on another rank, or the weight)."""
    gradient = unquantized_format(getattr(weight, "main_grad", weight))
    return gradient, FP32 if hasattr(weight, "main_param") else unquantized_format(weight)


def _require_class(module: Any, *classes: type) -> Any:
    """Return `module`. Raise RunError if it is not an instance of `classes`."""
    if not isinstance(module, classes):
        raise RunError(f"the precision graph does not know the trainer's module {type(module).__name__}")
    return module
