"""The operators of a decoder-only model and how they are connected, the same for trainer and engine.

Each side reads its live modules into a `DecoderPrecision`: the operators of each layer and the formats in which they consume their tensors.
`decoder_graph` adds the edges of the forward pass, and those of the backward pass if the operators have gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_rl.precision.graph.graph import FORWARD, Edge, Node, PrecisionGraph, TensorPrecision
from parallel.adapters import NAMES

_PARAMETERS = ("weight", "bias", *NAMES)
_LINEARS = ("linear", "tree_linear", "router", "lm_head", "value_head")
_RESIDUAL = "mlp.residual"
Table = dict[str, tuple[str, dict[str, list[str]]]]
"""Operator -> (its kind, {input: operators that may produce it})."""


def _parse(text: str) -> Table:
    """Parse lines "operator kind input=producer,producer"; the first of the producers that a layer has produces the input."""
    rows = (line.split() for line in text.strip().splitlines())
    pairs = ((name, kind, (part.split("=") for part in inputs)) for name, kind, *inputs in rows)
    return {name: (kind, {tensor: producers.split(",") for tensor, producers in inputs}) for name, kind, inputs in pairs}


_FIRST: Table = {"embedding": ("embedding", {})}
_LAYER = _parse("""
    input_norm                 norm         x=input
    attention.qkv              linear       x=input_norm
    attention.q_norm           norm         x=attention.qkv
    attention.k_norm           norm         x=attention.qkv
    attention.q_a              linear       x=input_norm
    attention.q_a_norm         norm         x=attention.q_a
    attention.q_b              linear       x=attention.q_a_norm,input_norm
    attention.kv_a             linear       x=input_norm
    attention.kv_a_norm        norm         x=attention.kv_a
    attention.rope             rope         q=attention.q_norm,attention.q_b,attention.qkv k=attention.k_norm,attention.kv_a,attention.qkv
    attention.kv_b.k           linear       x=attention.q_b
    attention.kv_b             linear       x=attention.kv_a_norm
    attention.core             attention    q=attention.kv_b.k,attention.rope q_rope=attention.rope k_rope=attention.rope \
                               k=attention.kv_b,attention.kv_a_norm,attention.rope v=attention.kv_b,attention.kv_a_norm,attention.qkv
    attention.kv_b.v           linear       x=attention.core
    attention.output           linear       x=attention.kv_b.v,attention.core
    attention.post_norm        norm         x=attention.output
    attention.residual         add          residual=input x=attention.post_norm,attention.output
    post_attention_norm        norm         x=attention.residual
    mlp.gate_up                linear       x=post_attention_norm
    mlp.swiglu                 swiglu       x=mlp.gate_up
    mlp.down                   linear       x=mlp.swiglu
    mlp.post_norm              norm         x=mlp.down
    mlp.router                 router       x=post_attention_norm
    mlp.experts.gate_up        linear       x=post_attention_norm
    mlp.experts.swiglu         swiglu       x=mlp.experts.gate_up
    mlp.experts.down           linear       x=mlp.experts.swiglu
    mlp.experts.sum            weighted_sum x=mlp.experts.down logits=mlp.router
    mlp.shared_experts.gate_up linear       x=post_attention_norm
    mlp.shared_experts.swiglu  swiglu       x=mlp.shared_experts.gate_up
    mlp.shared_experts.down    linear       x=mlp.shared_experts.swiglu
    mlp.residual               add          residual=attention.residual x=mlp.post_norm,mlp.down,mlp.experts.sum \
                               shared=mlp.shared_experts.down
""")
_LAST = _parse("""
    norm                       norm          x=input
    lm_head                    lm_head       x=norm
    logprobs                   log_softmax   x=lm_head
    value_head                 value_head    x=norm
    values                     value_loss    x=value_head
""")


@dataclass(frozen=True)
class Gradients:
    """Formats of the backward pass of an operator with a weight."""

    dy: TensorPrecision
    """dy in DGrad."""
    weight: TensorPrecision
    """W in DGrad."""
    dy_wgrad: TensorPrecision
    """dy^T in WGrad."""
    x: TensorPrecision
    """x in WGrad."""
    grad: TensorPrecision
    """Accumulated weight gradient."""
    master: TensorPrecision
    """Weight that the optimizer steps."""
    trained: tuple[str, ...] = ("weight", "bias")
    """Tensors that the optimizer steps: those of the adapter with LoRA; empty if the operator is frozen."""


@dataclass(frozen=True)
class Operator:
    """An operator of the model and the format of each tensor that it consumes, parameters included."""

    inputs: Mapping[str, TensorPrecision]
    detail: str = ""
    gradients: Gradients | None = None
    by_tree: bool = False
    """Whether a linear layer sums by the tree of the contract (`kernels.sums.reference`)."""
    count: int = 1
    """Number of equal experts."""

    def with_inputs(self, **inputs: TensorPrecision | None) -> Operator:
        """Return the operator with some inputs replaced, added, or removed if None."""
        formats = {name: format for name, format in {**self.inputs, **inputs}.items() if format is not None}
        return replace(self, inputs=formats)


@dataclass(frozen=True)
class LayerPrecision:
    """One layer: its operators with weights, by the names of `_LAYER`, and the formats of the tensors between the others."""

    operators: Mapping[str, Operator]
    residual: TensorPrecision
    """The residual stream."""
    kv: TensorPrecision
    """Keys and values as the attention reads them; in a rollout, from the cache."""
    attention: str = ""
    """Implementation of the attention."""
    rope: str = ""
    """Where rotary positions are rounded."""
    swiglu: str = ""
    """Where SwiGLU is rounded."""
    logits: TensorPrecision | None = None
    """Logits of the router."""

    def complete(self, hidden: TensorPrecision) -> dict[str, Operator]:
        """Return all operators, including those without weights."""
        operators, kv, tensors = dict(self.operators), self.kv, {"q": hidden, "k": self.kv, "v": self.kv}
        if "attention.kv_b" in operators:
            tensors = {"q": hidden, "k": hidden, "v": hidden, "k_rope": kv}
        elif "attention.kv_b.k" in operators:  # queries are multiplied with the K part of kv_b, attended latents with its V part
            tensors = {"q": hidden, "q_rope": hidden, "k": kv, "v": kv, "k_rope": kv}
        operators["attention.rope"] = Operator({"q": hidden, "k": hidden}, self.rope)
        operators["attention.core"] = Operator(tensors, self.attention)
        operators["attention.residual"] = operators[_RESIDUAL] = Operator({"residual": self.residual, "x": hidden})
        for mlp in ("mlp", "mlp.experts", "mlp.shared_experts"):
            if (gate_up := operators.get(f"{mlp}.gate_up")) is not None:
                operators[f"{mlp}.swiglu"] = Operator({"x": hidden}, self.swiglu, count=gate_up.count)
        if self.logits is not None:
            operators["mlp.experts.sum"] = Operator({"x": hidden, "logits": self.logits})
        if "mlp.shared_experts.down" in operators:
            operators[_RESIDUAL] = operators[_RESIDUAL].with_inputs(shared=hidden)
        return operators


@dataclass(frozen=True)
class DecoderPrecision:
    """The part of the model on one rank. On a pipeline stage without embedding or output layer, `ends` lacks their operators."""

    hidden: TensorPrecision
    """Activations between operators."""
    layers: Mapping[int, LayerPrecision]
    """By number in the whole model."""
    ends: Mapping[str, Operator]
    """Operators outside of the layers, by the names of `_FIRST` and `_LAST`."""


def decoder_graph(model: DecoderPrecision) -> PrecisionGraph:
    """Return the graph of one rank's part; operators of other ranks appear only as names on edges."""
    builder = _Builder(model.hidden)
    builder.add(_FIRST, model.ends, "", "")
    for number, layer in sorted(model.layers.items()):
        source = f"layers.{number - 1}.{_RESIDUAL}" if number else "embedding"
        builder.add(_LAYER, layer.complete(model.hidden), f"layers.{number}.", source)
    builder.add(_LAST, model.ends, "", f"layers.{max(model.layers)}.{_RESIDUAL}" if model.layers else "embedding")
    if builder.gradients:
        builder.add_backward()
    return PrecisionGraph(tuple(builder.nodes.values()), tuple(builder.edges))


@dataclass
class _Builder:
    hidden: TensorPrecision
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    gradients: dict[str, Gradients] = field(default_factory=dict)

    def node(self, name: str, op: str, count: int = 1, detail: str = "") -> str:
        self.nodes[name] = Node(name, op, count, detail)
        return name

    def edge(self, source: str, target: str, tensor: str, format: TensorPrecision, phase: str = FORWARD) -> None:
        self.edges.append(Edge(source, target, tensor, format, phase))

    def add(self, table: Table, operators: Mapping[str, Operator], prefix: str, source: str) -> None:
        """Add the operators that the table names. `source` produces their `input`."""
        for name, (kind, producers) in table.items():
            if (operator := operators.get(name)) is None:
                continue
            target = self.node(prefix + name, "tree_linear" if operator.by_tree else kind, operator.count, operator.detail)
            for tensor, format in operator.inputs.items():
                if tensor in _PARAMETERS:
                    self.edge(self.node(f"{target}.{tensor}", "weight", operator.count), target, tensor, format)
                else:
                    producer = next(name for name in producers[tensor] if name == "input" or name in operators)
                    self.edge(source if producer == "input" else prefix + producer, target, tensor, format)
            if operator.gradients is not None:
                self.gradients[target] = operator.gradients

    def add_backward(self) -> None:
        """Add the backward pass of every edge.

        A linear layer A has two products: A.backward is DGrad, A.wgrad is WGrad. Other operators, and linear layers that are not trained,
        have only A.backward.
        """
        for node in [node for node in self.nodes.values() if node.op != "weight"]:
            self.node(f"{node.name}.backward", "dgrad" if node.op in _LINEARS else "backward", node.count)
            gradients = self.gradients.get(node.name)
            if node.op in _LINEARS and (gradients is None or gradients.trained):
                self.node(f"{node.name}.wgrad", "wgrad", node.count)
        for edge in list(self.edges):
            if edge.source in self.nodes and self.nodes[edge.source].op == "weight":
                self._add_weight_gradient(edge)
            else:
                self._add_activation_gradient(edge)

    def _add_activation_gradient(self, edge: Edge) -> None:
        source, target, of_source, of_target = edge.source, edge.target, self.gradients.get(edge.source), self.gradients.get(edge.target)
        if of_source is not None and self.nodes[source].op in _LINEARS:
            self.edge(f"{target}.backward", f"{source}.backward", "dy", of_source.dy, "dgrad")
        else:
            self.edge(f"{target}.backward", f"{source}.backward", f"d{edge.tensor}", self.hidden, "dgrad")
        if of_source is not None and f"{source}.wgrad" in self.nodes:
            self.edge(f"{target}.backward", f"{source}.wgrad", "dy", of_source.dy_wgrad, "wgrad")
        if of_target is not None and edge.tensor == "x" and (of_target.trained or self.nodes[target].op not in _LINEARS):
            product, phase = ("wgrad", "wgrad") if f"{target}.wgrad" in self.nodes else ("backward", "dgrad")
            self.edge(source, f"{target}.{product}", "x", of_target.x, phase)

    def _add_weight_gradient(self, edge: Edge) -> None:
        """Add edges from the weight to DGrad, from WGrad to the master if there is one, and from the master to the weight."""
        weight, name, gradients = edge.source, edge.target, self.gradients.get(edge.target)
        if gradients is None:
            return
        if edge.tensor in NAMES or (edge.tensor == "weight" and self.nodes[name].op != "embedding"):
            self.edge(weight, f"{name}.backward", edge.tensor, edge.format if edge.tensor in NAMES else gradients.weight, "dgrad")
        if edge.tensor not in gradients.trained:
            return
        is_bias = edge.tensor == "bias"
        product = f"{name}.wgrad" if not is_bias and f"{name}.wgrad" in self.nodes else f"{name}.backward"
        if is_bias or gradients.master == edge.format:
            self.edge(product, weight, "grad", gradients.grad, "wgrad")
        else:
            master = self.node(f"{weight}.master", "master", self.nodes[name].count)
            self.edge(product, master, "grad", gradients.grad, "wgrad")
            self.edge(master, weight, "master", gradients.master, "update")
