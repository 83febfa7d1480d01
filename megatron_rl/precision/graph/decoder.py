"""How the operators of a decoder-only model hang together, told once for both sides.

A side reads its live modules into a `DecoderPrecision`: which operators a layer has and in which precision each consumes its tensors.
`decoder_graph` lays out the forward pass, and where the trainer tells how gradients are computed, the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megatron_rl.precision.graph.graph import FORWARD, Edge, Node, PrecisionGraph, TensorFormat

Inputs = Mapping[str, tuple[str, TensorFormat]]
"""Tensor -> (the operator that makes it, its precision)."""

_LINEARS = ("linear", "router", "lm_head")


@dataclass(frozen=True)
class GradientFormats:
    """How the two backward products of a linear layer read their operands, and in which precision the weight is learned."""

    dy: TensorFormat
    """dy in DGrad."""
    weight: TensorFormat
    """W in DGrad."""
    dy_wgrad: TensorFormat
    """dy^T in WGrad."""
    x: TensorFormat
    """x in WGrad."""
    grad: TensorFormat
    """The accumulated weight gradient."""
    master: TensorFormat
    """What the optimizer steps."""


@dataclass(frozen=True)
class WeightedOpPrecision:
    """An operator with a weight: how it reads its input `x` and its weight, and the gradients where it is trained."""

    x: TensorFormat
    weight: TensorFormat
    bias: TensorFormat | None = None
    detail: str = ""
    gradients: GradientFormats | None = None


@dataclass(frozen=True)
class AttentionPrecision:
    qkv: WeightedOpPrecision
    output: WeightedOpPrecision
    q: TensorFormat
    kv: TensorFormat
    """Keys and values as the attention reads them: in a rollout, from the cache."""
    q_norm: WeightedOpPrecision | None = None
    k_norm: WeightedOpPrecision | None = None
    detail: str = ""


@dataclass(frozen=True)
class MLAPrecision:
    """Multi-latent attention: keys, values and, with `q_a`, queries go through a narrow latent."""

    q_b: WeightedOpPrecision
    kv_a: WeightedOpPrecision
    kv_a_norm: WeightedOpPrecision
    kv_b: WeightedOpPrecision
    """From the latent, which a rollout reads from its cache."""
    output: WeightedOpPrecision
    q: TensorFormat
    kv: TensorFormat
    q_a: WeightedOpPrecision | None = None
    q_a_norm: WeightedOpPrecision | None = None
    detail: str = ""


@dataclass(frozen=True)
class MLPPrecision:
    gate_up: WeightedOpPrecision
    down: WeightedOpPrecision
    count: int = 1


@dataclass(frozen=True)
class MoEPrecision:
    router: WeightedOpPrecision
    logits: TensorFormat
    experts: MLPPrecision
    shared: MLPPrecision | None = None


@dataclass(frozen=True)
class LayerPrecision:
    input_norm: WeightedOpPrecision
    attention: AttentionPrecision | MLAPrecision
    post_attention_norm: WeightedOpPrecision
    mlp: MLPPrecision | MoEPrecision
    residual: TensorFormat
    """The stream between the layers."""


@dataclass(frozen=True)
class DecoderPrecision:
    """What one rank holds: layers by their number in the whole model; the ends are None on a pipeline stage without them."""

    hidden: TensorFormat
    """What travels between operators."""
    layers: dict[int, LayerPrecision]
    embedding: WeightedOpPrecision | None = None
    norm: WeightedOpPrecision | None = None
    lm_head: WeightedOpPrecision | None = None
    logits: TensorFormat | None = None


@dataclass
class _Builder:
    hidden: TensorFormat
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    gradients: dict[str, GradientFormats] = field(default_factory=dict)

    def op(self, name: str, op: str, inputs: Inputs = MappingProxyType({}), count: int = 1, detail: str = "") -> str:
        """An operator and the edges into it. Returns its name."""
        self.nodes[name] = Node(name, op, count, detail)
        self.edges += [Edge(source, name, tensor, format) for tensor, (source, format) in inputs.items()]
        return name

    def weighted(self, name: str, op: str, source: str | None, read: WeightedOpPrecision, count: int = 1) -> str:
        """`op` with its weight and bias."""
        self.op(name, op, {"x": (source, read.x)} if source else {}, count, read.detail)
        for tensor, format in (("weight", read.weight), ("bias", read.bias)):
            if format is not None:
                weight = self.op(f"{name}.{tensor}", "weight", count=count)
                self.edges.append(Edge(weight, name, tensor, format))
        if read.gradients is not None:
            self.gradients[name] = read.gradients
        return name


def decoder_graph(read: DecoderPrecision) -> PrecisionGraph:
    """The graph of what one rank holds; its neighbours' operators appear as names on edges only."""
    build = _Builder(read.hidden)
    if read.embedding is not None:
        build.weighted("embedding", "embedding", None, read.embedding)
    for number, layer in sorted(read.layers.items()):
        _layer(build, f"layers.{number}.", layer, f"layers.{number - 1}.mlp.residual" if number else "embedding")
    if read.norm is not None and read.lm_head is not None and read.logits is not None:
        last = f"layers.{max(read.layers)}.mlp.residual" if read.layers else "embedding"
        normed = build.weighted("norm", "norm", last, read.norm)
        head = build.weighted("lm_head", "lm_head", normed, read.lm_head)
        build.op("logprobs", "log_softmax", {"x": (head, read.logits)})
    _add_backward(build)
    return PrecisionGraph(tuple(build.nodes.values()), tuple(build.edges))


def _layer(build: _Builder, at: str, layer: LayerPrecision, source: str) -> None:
    normed = build.weighted(f"{at}input_norm", "norm", source, layer.input_norm)
    if isinstance(layer.attention, AttentionPrecision):
        attended = _attention(build, f"{at}attention.", layer.attention, normed)
    else:
        attended = _latent_attention(build, f"{at}attention.", layer.attention, normed)
    middle = build.op(f"{at}attention.residual", "add", {"residual": (source, layer.residual), "x": (attended, build.hidden)})
    normed = build.weighted(f"{at}post_attention_norm", "norm", middle, layer.post_attention_norm)
    if isinstance(layer.mlp, MLPPrecision):
        added: Inputs = {"x": (_mlp(build, f"{at}mlp.", layer.mlp, normed), build.hidden)}
    else:
        added = _experts(build, f"{at}mlp.", layer.mlp, normed)
    build.op(f"{at}mlp.residual", "add", {"residual": (middle, layer.residual), **added})


def _attention(build: _Builder, at: str, read: AttentionPrecision, source: str) -> str:
    qkv = q = k = build.weighted(f"{at}qkv", "linear", source, read.qkv)
    if read.q_norm is not None:
        q = build.weighted(f"{at}q_norm", "norm", qkv, read.q_norm)
    if read.k_norm is not None:
        k = build.weighted(f"{at}k_norm", "norm", qkv, read.k_norm)
    rope = build.op(f"{at}rope", "rope", {"q": (q, build.hidden), "k": (k, build.hidden)})
    core = build.op(f"{at}core", "attention", {"q": (rope, read.q), "k": (rope, read.kv), "v": (qkv, read.kv)}, detail=read.detail)
    return build.weighted(f"{at}output", "linear", core, read.output)


def _latent_attention(build: _Builder, at: str, read: MLAPrecision, source: str) -> str:
    latent = source
    if read.q_a is not None and read.q_a_norm is not None:
        latent = build.weighted(f"{at}q_a_norm", "norm", build.weighted(f"{at}q_a", "linear", source, read.q_a), read.q_a_norm)
    q = build.weighted(f"{at}q_b", "linear", latent, read.q_b)
    kv_a = build.weighted(f"{at}kv_a", "linear", source, read.kv_a)
    kv = build.weighted(f"{at}kv_b", "linear", build.weighted(f"{at}kv_a_norm", "norm", kv_a, read.kv_a_norm), read.kv_b)
    rope = build.op(f"{at}rope", "rope", {"q": (q, build.hidden), "k": (kv_a, build.hidden)})
    inputs = {"q": (rope, read.q), "k_rope": (rope, read.kv), "k": (kv, build.hidden), "v": (kv, build.hidden)}
    core = build.op(f"{at}core", "attention", inputs, detail=read.detail)
    return build.weighted(f"{at}output", "linear", core, read.output)


def _mlp(build: _Builder, at: str, read: MLPPrecision, source: str) -> str:
    gate_up = build.weighted(f"{at}gate_up", "linear", source, read.gate_up, read.count)
    act = build.op(f"{at}swiglu", "swiglu", {"x": (gate_up, build.hidden)}, read.count)
    return build.weighted(f"{at}down", "linear", act, read.down, read.count)


def _experts(build: _Builder, at: str, read: MoEPrecision, source: str) -> Inputs:
    """The mixture's sum, and the shared experts' output where there are any: what the residual stream adds."""
    router = build.weighted(f"{at}router", "router", source, read.router)
    down = _mlp(build, f"{at}experts.", read.experts, source)
    summed = build.op(f"{at}experts.sum", "weighted_sum", {"x": (down, build.hidden), "logits": (router, read.logits)})
    inputs = {"x": (summed, build.hidden)}
    if read.shared is not None:
        inputs["shared"] = (_mlp(build, f"{at}shared_experts.", read.shared, source), build.hidden)
    return inputs


def _add_backward(build: _Builder) -> None:
    """The backward pass of every edge, where the operators tell their gradients.

    A linear layer A has two products: A.backward is DGrad, A.wgrad is WGrad. Every other operator has A.backward alone.
    """
    if not build.gradients:
        return
    operators = [node for node in build.nodes.values() if node.op != "weight"]
    for node in operators:
        build.op(f"{node.name}.backward", "dgrad" if node.op in _LINEARS else "backward", count=node.count)
        if node.op in _LINEARS:
            build.op(f"{node.name}.wgrad", "wgrad", count=node.count)
    for edge in [edge for edge in build.edges if edge.phase == FORWARD]:
        if build.nodes.get(edge.source, Node("", "")).op == "weight":
            _weight_gradient(build, edge)
        else:
            _activation_gradient(build, edge)


def _activation_gradient(build: _Builder, edge: Edge) -> None:
    source, target = edge.source, edge.target
    told, made = build.gradients.get(target), build.gradients.get(source)
    if made is not None and f"{source}.wgrad" in build.nodes:
        build.edges.append(Edge(f"{target}.backward", f"{source}.backward", "dy", made.dy, "dgrad"))
        build.edges.append(Edge(f"{target}.backward", f"{source}.wgrad", "dy", made.dy_wgrad, "wgrad"))
    else:
        build.edges.append(Edge(f"{target}.backward", f"{source}.backward", f"d{edge.tensor}", build.hidden, "dgrad"))
    if told is not None and edge.tensor == "x":
        if f"{target}.wgrad" in build.nodes:
            build.edges.append(Edge(source, f"{target}.wgrad", "x", told.x, "wgrad"))
        else:
            build.edges.append(Edge(source, f"{target}.backward", "x", told.x, "dgrad"))


def _weight_gradient(build: _Builder, edge: Edge) -> None:
    """Into DGrad go the weights; out of WGrad comes the gradient; the master, where there is one, is stepped and becomes the weight."""
    name, told = edge.target, build.gradients.get(edge.target)
    if told is None:
        return
    if edge.tensor == "weight" and build.nodes[name].op != "embedding":
        build.edges.append(Edge(edge.source, f"{name}.backward", "weight", told.weight, "dgrad"))
    made = f"{name}.wgrad" if edge.tensor == "weight" and f"{name}.wgrad" in build.nodes else f"{name}.backward"
    count = build.nodes[name].count
    if edge.tensor == "weight" and told.master != edge.format:
        master = build.op(f"{edge.source}.master", "master", count=count)
        build.edges.append(Edge(made, master, "grad", told.grad, "wgrad"))
        build.edges.append(Edge(master, edge.source, "master", told.master, "update"))
    else:
        build.edges.append(Edge(made, edge.source, "grad", told.grad, "wgrad"))
