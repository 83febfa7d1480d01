"""The operators of a decoder-only model and how they are connected, for trainer and engine. Each side reads its live modules into a
`DecoderPrecision`. `decoder_graph` adds the edges of the forward pass, and those of the backward pass if the operators have gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_rl.precision.graph.graph import FORWARD, Edge, Node, PrecisionGraph, TensorPrecision
from parallel.adapters import NAMES

_PARAMETERS = ("weight", "bias", *NAMES)
_LINEARS = ("linear", "tree_linear", "router", "lm_head", "value_head")
_RESIDUAL = "mlp.residual"
Table = dict[str, tuple[str, dict[str, list[str]]]]  # operator -> (its kind, what follows it in the table)


def _parse(text: str) -> Table:
    """Parse lines "operator kind input=producer,producer"; the first of the producers that a layer has produces the input. `megatron` and
    `sglang` name the modules that may be the operator, of which a layer has at most one."""
    rows = (line.split() for line in text.strip().splitlines())
    pairs = ((name, kind, (part.split("=") for part in rest)) for name, kind, *rest in rows)
    return {name: (kind, {key: names.split(",") for key, names in rest}) for name, kind, rest in pairs}


_FIRST: Table = {"embedding": ("embedding", {})}
LAYER = _parse("""
    input_norm                 norm         x=input                megatron=input_layernorm sglang=input_layernorm
    attention.qkv              linear       x=input_norm           megatron=self_attention.linear_qkv sglang=self_attn.qkv_proj
    attention.q_norm           norm         x=attention.qkv        megatron=self_attention.q_layernorm sglang=self_attn.q_norm
    attention.k_norm           norm         x=attention.qkv        megatron=self_attention.k_layernorm sglang=self_attn.k_norm
    attention.q_a              linear       x=input_norm \
                                            megatron=self_attention.linear_q_down_proj sglang=self_attn.fused_qkv_a_proj_with_mqa
    attention.q_a_norm         norm         x=attention.q_a        sglang=self_attn.q_a_layernorm
    attention.q_b              linear       x=attention.q_a_norm,input_norm \
                                            megatron=self_attention.linear_q_up_proj,self_attention.linear_q_proj \
                                            sglang=self_attn.q_b_proj,self_attn.q_proj
    attention.kv_a             linear       x=input_norm           megatron=self_attention.linear_kv_down_proj \
                                            sglang=self_attn.kv_a_proj_with_mqa,self_attn.fused_qkv_a_proj_with_mqa
    attention.kv_a_norm        norm         x=attention.kv_a       megatron=self_attention.kv_layernorm sglang=self_attn.kv_a_layernorm
    attention.rope             rope         q=attention.q_norm,attention.q_b,attention.qkv k=attention.k_norm,attention.kv_a,attention.qkv
    attention.kv_b.k           linear       x=attention.q_b
    attention.kv_b             linear       x=attention.kv_a_norm  megatron=self_attention.linear_kv_up_proj sglang=self_attn.kv_b_proj
    attention.core             attention    q=attention.kv_b.k,attention.rope k=attention.kv_b,attention.kv_a_norm,attention.rope \
                                            q_rope=attention.rope k_rope=attention.rope v=attention.kv_b,attention.kv_a_norm,attention.qkv
    attention.kv_b.v           linear       x=attention.core
    attention.output           linear       x=attention.kv_b.v,attention.core megatron=self_attention.linear_proj sglang=self_attn.o_proj
    attention.post_norm        norm         x=attention.output     megatron=self_attn_bda.norm sglang=post_self_attn_layernorm
    attention.residual         add          residual=input x=attention.post_norm,attention.output
    post_attention_norm        norm         x=attention.residual   megatron=pre_mlp_layernorm sglang=post_attention_layernorm
    mlp.gate_up                linear       x=post_attention_norm  megatron=mlp.linear_fc1 sglang=mlp.gate_up_proj
    mlp.swiglu                 swiglu       x=mlp.gate_up
    mlp.down                   linear       x=mlp.swiglu           megatron=mlp.linear_fc2 sglang=mlp.down_proj
    mlp.post_norm              norm         x=mlp.down             megatron=mlp_bda.norm sglang=post_mlp_layernorm
    mlp.router                 router       x=post_attention_norm
    mlp.experts.gate_up        linear       x=post_attention_norm
    mlp.experts.swiglu         swiglu       x=mlp.experts.gate_up
    mlp.experts.down           linear       x=mlp.experts.swiglu
    mlp.experts.sum            weighted_sum x=mlp.experts.down logits=mlp.router
    mlp.shared_experts.gate_up linear       x=post_attention_norm \
                                            megatron=mlp.shared_experts.linear_fc1 sglang=mlp.shared_experts.gate_up_proj
    mlp.shared_experts.swiglu  swiglu       x=mlp.shared_experts.gate_up
    mlp.shared_experts.down    linear       x=mlp.shared_experts.swiglu \
                                            megatron=mlp.shared_experts.linear_fc2 sglang=mlp.shared_experts.down_proj
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

    dy: TensorPrecision  # dy in DGrad
    weight: TensorPrecision  # W in DGrad
    dy_wgrad: TensorPrecision  # dy^T in WGrad
    x: TensorPrecision  # x in WGrad
    grad: TensorPrecision  # accumulated weight gradient
    master: TensorPrecision  # weight that the optimizer steps
    trained: tuple[str, ...] = ("weight", "bias")  # what the optimizer steps: with LoRA, the adapter; nothing if frozen


@dataclass(frozen=True)
class Operator:
    """An operator of the model and the format of each tensor that it consumes, parameters included."""

    inputs: Mapping[str, TensorPrecision]
    detail: str = ""
    gradients: Gradients | None = None
    by_tree: bool = False  # whether a linear layer sums by the tree of the contract (`kernels.sums.reference`)
    count: int = 1  # number of equal experts

    def with_inputs(self, **inputs: TensorPrecision | None) -> Operator:
        """Return the operator with some inputs replaced, added, or removed if None."""
        return replace(self, inputs={name: format for name, format in {**self.inputs, **inputs}.items() if format is not None})


@dataclass(frozen=True)
class LayerPrecision:
    """One layer: its operators with weights, by the names of `LAYER`, and the formats of the tensors between the others."""

    operators: Mapping[str, Operator]
    residual: TensorPrecision  # the residual stream
    kv: TensorPrecision  # keys and values as the attention reads them; in a rollout, from the cache
    attention: str = ""  # implementation of the attention
    rope: str = ""  # where rotary positions are rounded
    swiglu: str = ""  # where SwiGLU is rounded
    logits: TensorPrecision | None = None  # logits of the router

    def complete(self, hidden: TensorPrecision) -> dict[str, Operator]:
        """Return all operators, including those without weights."""
        operators, core = dict(self.operators), Operator({"q": hidden}, self.attention)
        up, absorbed = "attention.kv_b" in operators, "attention.kv_b.k" in operators  # absorbed: attends latents, without keys and values
        read, q_rope, k_rope = hidden if up else self.kv, hidden if absorbed else None, self.kv if up or absorbed else None
        operators["attention.core"] = core.with_inputs(q_rope=q_rope, k=read, v=read, k_rope=k_rope)
        operators["attention.rope"] = Operator({"q": hidden, "k": hidden}, self.rope)
        operators["attention.residual"] = add = Operator({"residual": self.residual, "x": hidden})
        operators[_RESIDUAL] = add.with_inputs(shared=hidden if "mlp.shared_experts.down" in operators else None)
        for mlp in ("mlp", "mlp.experts", "mlp.shared_experts"):
            if (gate_up := operators.get(f"{mlp}.gate_up")) is not None:
                operators[f"{mlp}.swiglu"] = Operator({"x": hidden}, self.swiglu, count=gate_up.count)
        if self.logits is not None:
            operators["mlp.experts.sum"] = Operator({"x": hidden, "logits": self.logits})
        return operators


@dataclass(frozen=True)
class DecoderPrecision:
    """The part of the model on one rank. On a pipeline stage without embedding or output layer, `ends` lacks their operators."""

    hidden: TensorPrecision  # activations between operators
    layers: Mapping[int, LayerPrecision]  # by number in the whole model
    ends: Mapping[str, Operator]  # operators outside of the layers, by the names of `_FIRST` and `_LAST`


def decoder_graph(model: DecoderPrecision) -> PrecisionGraph:
    """Return the graph of one rank's part; operators of other ranks appear only as names on edges."""
    builder = _Builder(model.hidden)
    builder.add(_FIRST, model.ends, "", "")
    for number, layer in sorted(model.layers.items()):
        source = f"layers.{number - 1}.{_RESIDUAL}" if number else "embedding"
        builder.add(LAYER, layer.complete(model.hidden), f"layers.{number}.", source)
    builder.add(_LAST, model.ends, "", f"layers.{max(model.layers)}.{_RESIDUAL}" if model.layers else "embedding")
    if builder.gradients:
        builder.add_backward()
    return PrecisionGraph(tuple(builder.nodes.values()), tuple(builder.edges))


class _Builder:
    def __init__(self, hidden: TensorPrecision) -> None:
        self.hidden = hidden
        self.nodes, self.edges, self.gradients = dict[str, Node](), list[Edge](), dict[str, Gradients]()

    def node(self, name: str, op: str, count: int = 1, detail: str = "") -> str:
        self.nodes[name] = Node(name, op, count, detail)
        return name

    def edge(self, source: str, target: str, tensor: str, format: TensorPrecision, phase: str = FORWARD) -> None:
        self.edges.append(Edge(source, target, tensor, format, phase))

    def add(self, table: Table, operators: Mapping[str, Operator], prefix: str, source: str) -> None:
        """Add the operators that the table names. `source` produces their `input`."""
        names = {"input": source, **{name: prefix + name for name in operators}}
        for name, (kind, producers) in table.items():
            if (operator := operators.get(name)) is None:
                continue
            target = self.node(names[name], "tree_linear" if operator.by_tree else kind, operator.count, operator.detail)
            for tensor, format in operator.inputs.items():
                if tensor in _PARAMETERS:
                    producer = self.node(f"{target}.{tensor}", "weight", operator.count)
                else:
                    producer = next(names[name] for name in producers[tensor] if name in names)
                self.edge(producer, target, tensor, format)
            if operator.gradients is not None:
                self.gradients[target] = operator.gradients

    def add_backward(self) -> None:
        """Add the backward pass of every edge. A linear layer A has two products: A.backward is DGrad, A.wgrad is WGrad. Other operators,
        and linear layers that are not trained, have only A.backward."""
        for node in [node for node in self.nodes.values() if node.op != "weight"]:
            self.node(f"{node.name}.backward", "dgrad" if node.op in _LINEARS else "backward", node.count)
            gradients = self.gradients.get(node.name)
            if node.op in _LINEARS and (gradients is None or gradients.trained):
                self.node(f"{node.name}.wgrad", "wgrad", node.count)
        for edge in list(self.edges):
            is_weight = edge.source in self.nodes and self.nodes[edge.source].op == "weight"
            (self._add_weight_gradient if is_weight else self._add_activation_gradient)(edge)

    def _add_activation_gradient(self, edge: Edge) -> None:
        source, target, of_source, of_target = edge.source, edge.target, self.gradients.get(edge.source), self.gradients.get(edge.target)
        dy, format = f"d{edge.tensor}", self.hidden
        if of_source is not None and self.nodes[source].op in _LINEARS:
            dy, format = "dy", of_source.dy
        self.edge(f"{target}.backward", f"{source}.backward", dy, format, "dgrad")
        if of_source is not None and f"{source}.wgrad" in self.nodes:
            self.edge(f"{target}.backward", f"{source}.wgrad", "dy", of_source.dy_wgrad, "wgrad")
        if of_target is not None and edge.tensor == "x" and (of_target.trained or self.nodes[target].op not in _LINEARS):
            product, phase = ("wgrad", "wgrad") if f"{target}.wgrad" in self.nodes else ("backward", "dgrad")
            self.edge(source, f"{target}.{product}", "x", of_target.x, phase)

    def _add_weight_gradient(self, edge: Edge) -> None:
        """Add edges from the weight to DGrad, from WGrad to the master if there is one, and from the master to the weight."""
        weight, name, tensor, gradients = edge.source, edge.target, edge.tensor, self.gradients.get(edge.target)
        if gradients is None:
            return
        if tensor in NAMES or (tensor == "weight" and self.nodes[name].op != "embedding"):
            self.edge(weight, f"{name}.backward", tensor, edge.format if tensor in NAMES else gradients.weight, "dgrad")
        if tensor not in gradients.trained:
            return
        product = f"{name}.wgrad" if tensor != "bias" and f"{name}.wgrad" in self.nodes else f"{name}.backward"
        has_master = tensor != "bias" and gradients.master != edge.format
        stepped = self.node(f"{weight}.master", "master", self.nodes[name].count) if has_master else weight
        self.edge(product, stepped, "grad", gradients.grad, "wgrad")
        if has_master:
            self.edge(stepped, weight, "master", gradients.master, "update")
