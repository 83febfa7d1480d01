"""How the operators of a decoder-only model are connected, the same for trainer and engine.

Each side reads its live modules into a `DecoderPrecision`: which operators a layer has and in which precision each consumes its tensors.
`decoder_graph` makes the edges of the forward pass, and of the backward pass where gradients are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megatron_rl.precision.graph.graph import FORWARD, Edge, Node, PrecisionGraph, TensorPrecision
from parallel.adapters import NAMES

Inputs = Mapping[str, tuple[str, TensorPrecision]]
"""Tensor -> (operator that produces it, its precision)."""

_LINEARS = ("linear", "tree_linear", "router", "lm_head", "value_head")


@dataclass(frozen=True)
class GradientFormats:
    """Precision of the operands of a linear layer's two backward products, and of what the optimizer reads."""

    dy: TensorPrecision
    """dy in DGrad."""
    weight: TensorPrecision
    """W in DGrad."""
    dy_wgrad: TensorPrecision
    """dy^T in WGrad."""
    x: TensorPrecision
    """x in WGrad."""
    grad: TensorPrecision
    """The accumulated weight gradient."""
    master: TensorPrecision
    """The weight that the optimizer steps."""
    trained: tuple[str, ...] = ("weight", "bias")
    """The tensors that it steps: with LoRA the adapter's, or none."""


@dataclass(frozen=True)
class WeightedOpPrecision:
    """An operator with a weight: precision of its input `x`, its weight, and its gradients where it is trained."""

    x: TensorPrecision
    weight: TensorPrecision
    bias: TensorPrecision | None = None
    detail: str = ""
    gradients: GradientFormats | None = None
    by_tree: bool = False
    """A linear layer that sums by the contract's tree (`kernels.sums.reference`)."""
    adapter: TensorPrecision | None = None
    """Both weights of a linear layer's adapter; its input is an activation as it is."""

    @property
    def linear(self) -> str:
        """The operator of a linear layer."""
        return "tree_linear" if self.by_tree else "linear"


@dataclass(frozen=True)
class AttentionPrecision:
    qkv: WeightedOpPrecision
    output: WeightedOpPrecision
    q: TensorPrecision
    kv: TensorPrecision
    """Keys and values as the attention reads them, in a rollout from the cache."""
    q_norm: WeightedOpPrecision | None = None
    k_norm: WeightedOpPrecision | None = None
    post_norm: WeightedOpPrecision | None = None
    """Of what is added to the residual stream."""
    detail: str = ""
    rope: str = ""
    """Where rotary positions are rounded."""


@dataclass(frozen=True)
class MLAPrecision:
    """Multi-latent attention: keys, values and, with `q_a`, queries are projected through a low-rank latent."""

    q_b: WeightedOpPrecision
    kv_a: WeightedOpPrecision
    kv_a_norm: WeightedOpPrecision
    kv_b: WeightedOpPrecision
    """From the latent, which a rollout reads from its cache."""
    output: WeightedOpPrecision
    q: TensorPrecision
    kv: TensorPrecision
    q_a: WeightedOpPrecision | None = None
    q_a_norm: WeightedOpPrecision | None = None
    absorbed: bool = False
    """Queries are multiplied with kv_b's part K, attended latents with its part V; else latents with both."""
    detail: str = ""
    rope: str = ""


@dataclass(frozen=True)
class MLPPrecision:
    gate_up: WeightedOpPrecision
    down: WeightedOpPrecision
    count: int = 1
    post_norm: WeightedOpPrecision | None = None
    """Of what is added to the residual stream."""
    swiglu: str = ""
    """Where it is rounded."""


@dataclass(frozen=True)
class MoEPrecision:
    router: WeightedOpPrecision
    logits: TensorPrecision
    experts: MLPPrecision
    shared: MLPPrecision | None = None


@dataclass(frozen=True)
class LayerPrecision:
    input_norm: WeightedOpPrecision
    attention: AttentionPrecision | MLAPrecision
    post_attention_norm: WeightedOpPrecision
    mlp: MLPPrecision | MoEPrecision
    residual: TensorPrecision
    """The residual stream."""


@dataclass(frozen=True)
class DecoderPrecision:
    """The part of one rank: layers by their number in the whole model; embedding and head are None on a pipeline stage without them."""

    hidden: TensorPrecision
    """Activations between operators."""
    layers: dict[int, LayerPrecision]
    embedding: WeightedOpPrecision | None = None
    norm: WeightedOpPrecision | None = None
    lm_head: WeightedOpPrecision | None = None
    logits: TensorPrecision | None = None
    is_critic: bool = False
    """`lm_head` is a value head, `logits` are values."""


@dataclass
class _Builder:
    hidden: TensorPrecision
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    gradients: dict[str, GradientFormats] = field(default_factory=dict)

    def op(self, name: str, op: str, inputs: Inputs = MappingProxyType({}), count: int = 1, detail: str = "") -> str:
        """Add an operator and the edges into it; return its name."""
        self.nodes[name] = Node(name, op, count, detail)
        self.edges += [Edge(source, name, tensor, format) for tensor, (source, format) in inputs.items()]
        return name

    def weighted(self, name: str, op: str, source: str | None, precision: WeightedOpPrecision, count: int = 1) -> str:
        """Add an operator with its weight and bias; return its name."""
        self.op(name, op, {"x": (source, precision.x)} if source else {}, count, precision.detail)
        adapter = dict.fromkeys(NAMES, precision.adapter)
        for tensor, format in {"weight": precision.weight, "bias": precision.bias, **adapter}.items():
            if format is not None:
                weight = self.op(f"{name}.{tensor}", "weight", count=count)
                self.edges.append(Edge(weight, name, tensor, format))
        if precision.gradients is not None:
            self.gradients[name] = precision.gradients
        return name


def decoder_graph(model: DecoderPrecision) -> PrecisionGraph:
    """Return the graph of one rank's part; other ranks' operators appear only as names on edges."""
    builder = _Builder(model.hidden)
    if model.embedding is not None:
        builder.weighted("embedding", "embedding", None, model.embedding)
    for number, layer in sorted(model.layers.items()):
        _add_layer(builder, f"layers.{number}.", layer, f"layers.{number - 1}.mlp.residual" if number else "embedding")
    if model.norm is not None and model.lm_head is not None and model.logits is not None:
        last = f"layers.{max(model.layers)}.mlp.residual" if model.layers else "embedding"
        normed = builder.weighted("norm", "norm", last, model.norm)
        name = "value_head" if model.is_critic else "lm_head"
        head = builder.weighted(name, name, normed, model.lm_head)
        builder.op(*(("values", "value_loss") if model.is_critic else ("logprobs", "log_softmax")), {"x": (head, model.logits)})
    _add_backward(builder)
    return PrecisionGraph(tuple(builder.nodes.values()), tuple(builder.edges))


def _add_layer(builder: _Builder, prefix: str, layer: LayerPrecision, source: str) -> None:
    normed = builder.weighted(f"{prefix}input_norm", "norm", source, layer.input_norm)
    if isinstance(layer.attention, AttentionPrecision):
        attended = _add_attention(builder, f"{prefix}attention.", layer.attention, normed)
    else:
        attended = _add_latent_attention(builder, f"{prefix}attention.", layer.attention, normed)
    residual = builder.op(f"{prefix}attention.residual", "add", {"residual": (source, layer.residual), "x": (attended, builder.hidden)})
    normed = builder.weighted(f"{prefix}post_attention_norm", "norm", residual, layer.post_attention_norm)
    if isinstance(layer.mlp, MLPPrecision):
        outputs: Inputs = {"x": (_add_mlp(builder, f"{prefix}mlp.", layer.mlp, normed), builder.hidden)}
    else:
        outputs = _add_experts(builder, f"{prefix}mlp.", layer.mlp, normed)
    builder.op(f"{prefix}mlp.residual", "add", {"residual": (residual, layer.residual), **outputs})


def _add_attention(builder: _Builder, prefix: str, precision: AttentionPrecision, source: str) -> str:
    qkv = q = k = builder.weighted(f"{prefix}qkv", "linear", source, precision.qkv)
    if precision.q_norm is not None:
        q = builder.weighted(f"{prefix}q_norm", "norm", qkv, precision.q_norm)
    if precision.k_norm is not None:
        k = builder.weighted(f"{prefix}k_norm", "norm", qkv, precision.k_norm)
    rope = builder.op(f"{prefix}rope", "rope", {"q": (q, builder.hidden), "k": (k, builder.hidden)}, detail=precision.rope)
    inputs = {"q": (rope, precision.q), "k": (rope, precision.kv), "v": (qkv, precision.kv)}
    core = builder.op(f"{prefix}core", "attention", inputs, detail=precision.detail)
    return _add_post_norm(builder, prefix, precision, builder.weighted(f"{prefix}output", precision.output.linear, core, precision.output))


def _add_latent_attention(builder: _Builder, prefix: str, precision: MLAPrecision, source: str) -> str:
    latent = source
    if precision.q_a is not None and precision.q_a_norm is not None:
        q_a = builder.weighted(f"{prefix}q_a", "linear", source, precision.q_a)
        latent = builder.weighted(f"{prefix}q_a_norm", "norm", q_a, precision.q_a_norm)
    q = builder.weighted(f"{prefix}q_b", "linear", latent, precision.q_b)
    kv_a = builder.weighted(f"{prefix}kv_a", "linear", source, precision.kv_a)
    kv = builder.weighted(f"{prefix}kv_a_norm", "norm", kv_a, precision.kv_a_norm)
    rope = builder.op(f"{prefix}rope", "rope", {"q": (q, builder.hidden), "k": (kv_a, builder.hidden)}, detail=precision.rope)
    if precision.absorbed:
        q = builder.weighted(f"{prefix}kv_b.k", "linear", q, precision.kv_b)
        inputs = {"q": (q, precision.q), "q_rope": (rope, precision.q), "k": (kv, precision.kv), "v": (kv, precision.kv)}
    else:
        kv = builder.weighted(f"{prefix}kv_b", "linear", kv, precision.kv_b)
        inputs = {"q": (rope, precision.q), "k": (kv, builder.hidden), "v": (kv, builder.hidden)}
    core = builder.op(f"{prefix}core", "attention", inputs | {"k_rope": (rope, precision.kv)}, detail=precision.detail)
    if precision.absorbed:
        core = builder.weighted(f"{prefix}kv_b.v", "linear", core, precision.kv_b)
    return builder.weighted(f"{prefix}output", precision.output.linear, core, precision.output)


def _add_mlp(builder: _Builder, prefix: str, precision: MLPPrecision, source: str) -> str:
    gate_up = builder.weighted(f"{prefix}gate_up", "linear", source, precision.gate_up, precision.count)
    act = builder.op(f"{prefix}swiglu", "swiglu", {"x": (gate_up, builder.hidden)}, precision.count, precision.swiglu)
    return _add_post_norm(
        builder, prefix, precision, builder.weighted(f"{prefix}down", precision.down.linear, act, precision.down, precision.count)
    )


def _add_post_norm(builder: _Builder, prefix: str, precision: AttentionPrecision | MLPPrecision, source: str) -> str:
    return source if precision.post_norm is None else builder.weighted(f"{prefix}post_norm", "norm", source, precision.post_norm)


def _add_experts(builder: _Builder, prefix: str, precision: MoEPrecision, source: str) -> Inputs:
    """Add a mixture of experts; return what the residual stream adds: their weighted sum, and the shared experts' output."""
    router = builder.weighted(f"{prefix}router", "router", source, precision.router)
    down = _add_mlp(builder, f"{prefix}experts.", precision.experts, source)
    summed = builder.op(f"{prefix}experts.sum", "weighted_sum", {"x": (down, builder.hidden), "logits": (router, precision.logits)})
    inputs = {"x": (summed, builder.hidden)}
    if precision.shared is not None:
        inputs["shared"] = (_add_mlp(builder, f"{prefix}shared_experts.", precision.shared, source), builder.hidden)
    return inputs


def _add_backward(builder: _Builder) -> None:
    """Add the backward pass of every edge, where gradients are given.

    A linear layer A has two products: A.backward is DGrad, A.wgrad is WGrad. Every other operator has A.backward alone, and so has a
    linear layer that does not train.
    """
    if not builder.gradients:
        return
    operators = [node for node in builder.nodes.values() if node.op != "weight"]
    for node in operators:
        builder.op(f"{node.name}.backward", "dgrad" if node.op in _LINEARS else "backward", count=node.count)
        gradients = builder.gradients.get(node.name)
        if node.op in _LINEARS and (gradients is None or gradients.trained):
            builder.op(f"{node.name}.wgrad", "wgrad", count=node.count)
    for edge in [edge for edge in builder.edges if edge.phase == FORWARD]:
        if builder.nodes.get(edge.source, Node("", "")).op == "weight":
            _add_weight_gradient(builder, edge)
        else:
            _add_activation_gradient(builder, edge)


def _add_activation_gradient(builder: _Builder, edge: Edge) -> None:
    source, target = edge.source, edge.target
    target_gradients, source_gradients = builder.gradients.get(target), builder.gradients.get(source)
    if source_gradients is not None and builder.nodes[source].op in _LINEARS:
        builder.edges.append(Edge(f"{target}.backward", f"{source}.backward", "dy", source_gradients.dy, "dgrad"))
    else:
        builder.edges.append(Edge(f"{target}.backward", f"{source}.backward", f"d{edge.tensor}", builder.hidden, "dgrad"))
    if source_gradients is not None and f"{source}.wgrad" in builder.nodes:
        builder.edges.append(Edge(f"{target}.backward", f"{source}.wgrad", "dy", source_gradients.dy_wgrad, "wgrad"))
    if target_gradients is not None and edge.tensor == "x" and (target_gradients.trained or builder.nodes[target].op not in _LINEARS):
        product, phase = ("wgrad", "wgrad") if f"{target}.wgrad" in builder.nodes else ("backward", "dgrad")
        builder.edges.append(Edge(source, f"{target}.{product}", "x", target_gradients.x, phase))


def _add_weight_gradient(builder: _Builder, edge: Edge) -> None:
    """Add edges from the weight to DGrad, and from WGrad to the master, where there is one, and from there to the weight."""
    name, gradients = edge.target, builder.gradients.get(edge.target)
    if gradients is None:
        return
    if edge.tensor == "weight" and builder.nodes[name].op != "embedding":
        builder.edges.append(Edge(edge.source, f"{name}.backward", "weight", gradients.weight, "dgrad"))
    if edge.tensor in NAMES:
        builder.edges.append(Edge(edge.source, f"{name}.backward", edge.tensor, edge.format, "dgrad"))
    if edge.tensor not in gradients.trained:
        return
    product = f"{name}.wgrad" if edge.tensor != "bias" and f"{name}.wgrad" in builder.nodes else f"{name}.backward"
    count = builder.nodes[name].count
    if edge.tensor != "bias" and gradients.master != edge.format:
        master = builder.op(f"{edge.source}.master", "master", count=count)
        builder.edges.append(Edge(product, master, "grad", gradients.grad, "wgrad"))
        builder.edges.append(Edge(master, edge.source, "master", gradients.master, "update"))
    else:
        builder.edges.append(Edge(product, edge.source, "grad", gradients.grad, "wgrad"))
