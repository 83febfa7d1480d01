"""The operators of a decoder-only model and how they are connected, for trainer and engine. Each side reads its live modules into operators
and layers. `decoder_graph` adds the edges of the forward pass, and those of the backward pass if the operators have gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_rl.precision.graph.graph import FORWARD, Edge, Node, PrecisionGraph, TensorPrecision
from megatron_rl.precision.graph.kernels import Kernel
from parallel.adapters import NAMES

DECAY = ("A_log", "dt_bias")
"""Parameters of the decay of a gated delta net's state, float32 on both sides."""
_PARAMETERS = ("weight", "bias", "sinks", *NAMES, *DECAY)
_LINEARS = ("linear", "tree_linear", "router", "lm_head", "value_head")
_RESIDUAL, _SHARED = "mlp.residual", "mlp.shared_experts."
Table = dict[str, tuple[str, dict[str, list[str]]]]  # operator -> (its kind, what follows it in the table)
_Signs = dict[str, tuple[str, ...]]
OPERATORS: _Signs = {"@": ("attention.",), "%": ("mlp.shared_experts.",)}  # what the signs of the tables stand for in names of operators
MODULES: dict[str, _Signs] = {
    "megatron": {"@": ("self_attention.",), "%": ("mlp.shared_experts.",)},
    "sglang": {"@": ("self_attn.", "linear_attn.", ""), "%": ("mlp.shared_experts.", "mlp.shared_expert.")},
}
"""What the signs stand for in paths of modules. In hybrid families, the layer itself owns the parts of SGLang's full attention."""


def expand(name: str, signs: _Signs) -> list[str]:
    return [place + name[1:] for place in signs[name[0]]] if name[0] in signs else [name]


def _parse(text: str) -> Table:
    """Parse lines "operator kind input=producer,producer"; the first of the producers that a layer has produces the input. `megatron` and
    `sglang` name the modules that may be the operator, of which a layer has at most one."""
    table: Table = {}
    for name, kind, *rest in (line.split() for line in text.strip().splitlines()):
        columns = {key: values.split(",") for key, values in (part.split("=") for part in rest)}
        names = {key: [each for value in values for each in expand(value, MODULES.get(key, OPERATORS))] for key, values in columns.items()}
        table[expand(name, OPERATORS)[0]] = kind, names
    return table


LAYER = _parse("""
    input_norm                 norm         x=input megatron=input_layernorm sglang=input_layernorm
    @qkv                       linear       x=input_norm megatron=@linear_qkv sglang=@qkv_proj
    @q_norm                    norm         x=@qkv megatron=@q_layernorm sglang=@q_norm
    @k_norm                    norm         x=@qkv megatron=@k_layernorm sglang=@k_norm
    @qkvz                      linear       x=input_norm megatron=@in_proj_qkvz sglang=@in_proj_qkvz
    @ba                        linear       x=input_norm megatron=@in_proj_ba sglang=@in_proj_ba
    @conv                      causal_conv  x=@qkvz
    @delta                     gated_delta  x=@conv gates=@ba state=@delta
    @gate_norm                 norm         x=@delta z=@qkvz megatron=@norm sglang=@norm
    @q_a                       linear       x=input_norm megatron=@linear_q_down_proj sglang=@fused_qkv_a_proj_with_mqa
    @q_a_norm                  norm         x=@q_a sglang=@q_a_layernorm
    @q_b                       linear       x=@q_a_norm,input_norm megatron=@linear_q_up_proj,@linear_q_proj sglang=@q_b_proj,@q_proj
    @kv_a                      linear       x=input_norm megatron=@linear_kv_down_proj sglang=@kv_a_proj_with_mqa,@fused_qkv_a_proj_with_mqa
    @kv_a_norm                 norm         x=@kv_a megatron=@kv_layernorm sglang=@kv_a_layernorm
    @rope                      rope         q=@q_norm,@q_b,@qkv k=@k_norm,@kv_a,@qkv
    @kv_b.k                    linear       x=@q_b
    @kv_b                      linear       x=@kv_a_norm megatron=@linear_kv_up_proj sglang=@kv_b_proj
    @core                 attention    q=@kv_b.k,@rope,@qkv k=@kv_b,@kv_a_norm,@rope,@qkv q_rope=@rope k_rope=@rope v=@kv_b,@kv_a_norm,@qkv
    @kv_b.v                    linear       x=@core
    @gate                      gate         x=@core gate=@qkv
    @output                    linear       x=@gate_norm,@gate,@kv_b.v,@core megatron=@linear_proj,@out_proj sglang=@o_proj,@out_proj
    @post_norm                 norm         x=@output megatron=self_attn_bda.norm sglang=post_self_attn_layernorm
    @residual                  add          residual=input x=@post_norm,@output
    post_attention_norm        norm         x=@residual megatron=pre_mlp_layernorm sglang=post_attention_layernorm
    mlp.gate_up                linear       x=post_attention_norm megatron=mlp.linear_fc1 sglang=mlp.gate_up_proj
    mlp.swiglu                 swiglu       x=mlp.gate_up
    mlp.down                   linear       x=mlp.swiglu megatron=mlp.linear_fc2 sglang=mlp.down_proj
    mlp.post_norm              norm         x=mlp.down megatron=mlp_bda.norm sglang=post_mlp_layernorm
    mlp.router                 router       x=post_attention_norm
    mlp.experts.gate_up        linear       x=post_attention_norm
    mlp.experts.swiglu         swiglu       x=mlp.experts.gate_up
    mlp.experts.down           linear       x=mlp.experts.swiglu
    mlp.experts.sum            weighted_sum x=mlp.experts.down logits=mlp.router
    %gate_up                   linear       x=post_attention_norm megatron=%linear_fc1 sglang=%gate_up_proj
    %swiglu                    swiglu       x=%gate_up
    %down                      linear       x=%swiglu megatron=%linear_fc2 sglang=%down_proj
    %score                     linear       x=post_attention_norm
    %gate                      gate         x=%down gate=%score
    mlp.residual               add          residual=@residual x=mlp.post_norm,mlp.down,mlp.experts.sum shared=%gate,%down
""")
_ENDS = _parse("""
    embedding                  embedding
    norm                       norm         x=input
    lm_head                    lm_head      x=norm
    logprobs                   log_softmax  x=lm_head
    value_head                 value_head   x=norm
    values                     value_loss   x=value_head
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
    kernel: Kernel | None = None  # what computes it

    def with_inputs(self, **inputs: TensorPrecision | None) -> Operator:
        """Return the operator with some inputs replaced, added, or removed if None."""
        return replace(self, inputs={name: format for name, format in {**self.inputs, **inputs}.items() if format is not None})


@dataclass(frozen=True)
class LayerPrecision:
    """One layer: its operators with weights, by the names of `LAYER`, and the formats of the tensors between the others."""

    operators: Mapping[str, Operator]
    residual: TensorPrecision  # the residual stream
    kv: TensorPrecision | None  # keys and values as the attention reads them; in a rollout, from the cache. None for a recurrent state
    attention: str = ""  # implementation of the attention
    logits: TensorPrecision | None = None  # logits of the router
    rotates: bool = True  # whether queries and keys have rotary positions
    gated: bool = False  # whether a gate multiplies the attention's output
    beside: Operator | None = None  # the attention's sinks, and their gradients
    kernels: Mapping[str, Kernel] = field(default_factory=dict)  # operator or kind -> what computes it, if the operator has none

    def complete(self, hidden: TensorPrecision) -> dict[str, Operator]:
        """Return all operators, including those without weights."""
        operators = {**self.operators, **self._complete_attention(hidden)}
        operators["attention.residual"] = add = Operator({"residual": self.residual, "x": hidden})
        operators[_RESIDUAL] = add.with_inputs(shared=hidden if _SHARED + "down" in operators else None)
        for mlp in ("mlp.", "mlp.experts.", _SHARED):
            if (gate_up := operators.get(f"{mlp}gate_up")) is not None:
                operators[f"{mlp}swiglu"] = Operator({"x": hidden}, count=gate_up.count)
        if _SHARED + "score" in operators:
            operators[_SHARED + "gate"] = Operator({"x": hidden, "gate": hidden})
        if self.logits is not None:
            operators["mlp.experts.sum"] = Operator({"x": hidden, "logits": self.logits})
        return operators

    def _complete_attention(self, hidden: TensorPrecision) -> dict[str, Operator]:
        if (norm := self.operators.get("attention.gate_norm")) is not None:
            return {"attention.gate_norm": norm.with_inputs(z=hidden)}
        core, up, absorbed = (
            Operator({"q": hidden}, self.attention),
            "attention.kv_b" in self.operators,
            "attention.kv_b.k" in self.operators,
        )
        if self.beside is not None:
            core = replace(core.with_inputs(**self.beside.inputs), gradients=self.beside.gradients)
        read = hidden if up else self.kv  # if absorbed, the attention reads latents, without keys and values
        q_rope, k_rope = hidden if absorbed else None, self.kv if up or absorbed else None
        operators = {"attention.core": core.with_inputs(q_rope=q_rope, k=read, v=read, k_rope=k_rope)}
        operators |= {"attention.rope": Operator({"q": hidden, "k": hidden})} if self.rotates else {}
        return operators | ({"attention.gate": Operator({"x": hidden, "gate": hidden})} if self.gated else {})


def decoder_graph(hidden: TensorPrecision, layers: Mapping[int, LayerPrecision], ends: Mapping[str, Operator]) -> PrecisionGraph:
    """Return the graph of one rank's part; operators of other ranks appear only as names on edges. `hidden`: activations between operators.
    `layers`: by number in the whole model. `ends`: operators outside of the layers, by the names of `_ENDS`."""
    builder = _Builder(hidden)
    for number, layer in sorted(layers.items()):
        source = f"layers.{number - 1}.{_RESIDUAL}" if number else "embedding"
        builder.add(LAYER, layer.complete(hidden), f"layers.{number}.", source, layer.kernels)
    builder.add(_ENDS, ends, "", f"layers.{max(layers)}.{_RESIDUAL}" if layers else "embedding")
    if builder.gradients:
        builder.add_backward()
    return PrecisionGraph(tuple(builder.nodes.values()), tuple(builder.edges))


class _Builder:
    def __init__(self, hidden: TensorPrecision) -> None:
        self.hidden = hidden
        self.nodes, self.edges = dict[str, Node](), list[Edge]()
        self.gradients, self.linears = dict[str, Gradients](), dict[str, Gradients]()  # of all operators, of linear layers

    def node(self, name: str, op: str, count: int = 1, detail: str = "", kernel: Kernel | None = None) -> str:
        self.nodes[name] = Node(name, op, count, detail, kernel)
        return name

    def edge(self, source: str, target: str, tensor: str, format: TensorPrecision, phase: str = FORWARD) -> None:
        self.edges.append(Edge(source, target, tensor, format, phase))

    def add(
        self, table: Table, operators: Mapping[str, Operator], prefix: str, source: str, kernels: Mapping[str, Kernel] | None = None
    ) -> None:
        """Add the operators that the table names. `source` produces their `input`."""
        names = {"input": source, **{name: prefix + name for name in operators}}
        for name, (kind, producers) in table.items():
            if (operator := operators.get(name)) is None:
                continue
            kernel = operator.kernel or (kernels or {}).get(name) or (kernels or {}).get(kind)
            target = self.node(names[name], "tree_linear" if operator.by_tree else kind, operator.count, operator.detail, kernel)
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
        operators = [node for node in self.nodes.values() if node.op != "weight"]
        self.linears = {node.name: self.gradients[node.name] for node in operators if node.op in _LINEARS}
        for node in operators:
            self.node(f"{node.name}.backward", "dgrad" if node.name in self.linears else "backward", node.count)
            if node.name in self.linears and self.linears[node.name].trained:
                self.node(f"{node.name}.wgrad", "wgrad", node.count)
        for edge in list(self.edges):
            is_weight = edge.source in self.nodes and self.nodes[edge.source].op == "weight"
            (self._add_weight_gradient if is_weight else self._add_activation_gradient)(edge)

    def _add_activation_gradient(self, edge: Edge) -> None:
        source, target, of_source, of_target = edge.source, edge.target, self.linears.get(edge.source), self.gradients.get(edge.target)
        dy, format = (f"d{edge.tensor}", self.hidden) if of_source is None else ("dy", of_source.dy)
        format = edge.format if source == target else format  # a recurrent state
        self.edge(f"{target}.backward", f"{source}.backward", dy, format, "dgrad")
        if of_source is not None and of_source.trained:
            self.edge(f"{target}.backward", f"{source}.wgrad", "dy", of_source.dy_wgrad, "wgrad")
        if of_target is not None and edge.tensor == "x" and (of_target.trained or target not in self.linears):
            product, phase = ("wgrad", "wgrad") if target in self.linears else ("backward", "dgrad")
            self.edge(source, f"{target}.{product}", "x", of_target.x, phase)

    def _add_weight_gradient(self, edge: Edge) -> None:
        """Add edges from the weight to DGrad, from WGrad to the master if there is one, and from the master to the weight."""
        weight, name, tensor, gradients = edge.source, edge.target, edge.tensor, self.gradients[edge.target]
        if tensor in NAMES or (tensor == "weight" and self.nodes[name].op != "embedding"):
            self.edge(weight, f"{name}.backward", tensor, edge.format if tensor in NAMES else gradients.weight, "dgrad")
        if tensor in gradients.trained:
            product = "wgrad" if tensor != "bias" and name in self.linears else "backward"
            has_master = tensor != "bias" and gradients.master != edge.format
            stepped = self.node(f"{weight}.master", "master", self.nodes[name].count) if has_master else weight
            self.edge(f"{name}.{product}", stepped, "grad", gradients.grad, "wgrad")
            if has_master:
                self.edge(stepped, weight, "master", gradients.master, "update")
