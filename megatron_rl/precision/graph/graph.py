"""The precision graph: operators and weights are nodes, the tensors between them are edges that carry a precision.

An edge states how its target consumes a tensor: "e4m3 1x128 pow2" into a linear layer means that the layer quantizes its input in
groups of 128 with power-of-two scales. Trainer and engine are read from their live modules (`mcore/precision_graph.py`,
`rollout_sglang/precision_graph.py`) with the same operator names, so that the two can be compared: the rollout's graph must be a subgraph
of the training graph's forward pass, operator by operator and edge by edge (Jet-RL, arXiv 2601.14243). No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from megatron_rl.errors import RunError
from parallel.layout import format_numbers

T = TypeVar("T")
FORWARD = "forward"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorPrecision:
    """The precision of a tensor: `dtype` ("bf16", "e4m3"), and for a quantized one the block that shares a scale and the scales' format."""

    dtype: str
    granularity: str = ""
    scale: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.dtype, self.granularity, self.scale)))

    @property
    def quantized(self) -> bool:
        return bool(self.granularity)


@dataclass(frozen=True)
class Node:
    """An operator or a weight. `count`: number of alike experts. `detail`, the module's class, is shown but not compared."""

    name: str
    op: str
    count: int = 1
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.op} x{self.count}" if self.count > 1 else self.op


@dataclass(frozen=True)
class Edge:
    """A tensor between two nodes. `phase`: forward, dgrad (gradients of activations), wgrad (of weights) or update (master to weight)."""

    source: str
    target: str
    tensor: str
    format: TensorPrecision
    phase: str = FORWARD

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.source, self.target, self.tensor, self.phase


@dataclass(frozen=True)
class PrecisionGraph:
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def select_forward(self) -> PrecisionGraph:
        """Return the part that runs in a forward pass."""
        edges = tuple(edge for edge in self.edges if edge.phase == FORWARD)
        used = {name for edge in edges for name in (edge.source, edge.target)}
        return PrecisionGraph(tuple(node for node in self.nodes if node.name in used), edges)

    def to_json(self) -> dict[str, Any]:
        return {"nodes": [asdict(node) for node in self.nodes], "edges": [asdict(edge) for edge in self.edges]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PrecisionGraph:
        edges = (Edge(**{**edge, "format": TensorPrecision(**edge["format"])}) for edge in data["edges"])
        return cls(tuple(Node(**node) for node in data["nodes"]), tuple(edges))


def merge_graphs(parts: Iterable[PrecisionGraph]) -> PrecisionGraph:
    """Merge the graphs of a model's ranks, each of its part. Raise RunError where two ranks disagree about a part."""
    nodes: dict[str, Node] = {}
    edges: dict[tuple[str, ...], Edge] = {}
    for part in parts:
        for node in part.nodes:
            if nodes.setdefault(node.name, node) != node:
                raise RunError(f"the trainer's precision graph: ranks disagree about {node.name}: {nodes[node.name]} and {node}")
        for edge in part.edges:
            if (other := edges.setdefault(edge.key, edge)) != edge:
                arrow = f"{edge.source} -> {edge.target} ({edge.tensor})"
                raise RunError(f"the trainer's precision graph: ranks disagree about {arrow}: {other.format} and {edge.format}")
    return PrecisionGraph(tuple(nodes.values()), tuple(edges.values()))


@dataclass(frozen=True)
class GraphDifference:
    """A difference of the two graphs. `layer` is None outside of the layers; names in `text` are within the layer."""

    layer: int | None
    text: str


def compare_graphs(rollout: PrecisionGraph, training: PrecisionGraph) -> list[GraphDifference]:
    """Return what keeps `rollout` from being a subgraph of `training`'s forward pass, and what of that pass it lacks; [] for nothing."""
    forward = training.select_forward()
    served, trained = ({node.name: str(node) for node in graph.nodes} for graph in (rollout, forward))
    differences = [
        _difference(name, name, "", served.get(name, "absent"), trained.get(name, "absent"))
        for name in {**served, **trained}
        if served.get(name) != trained.get(name)
    ]
    served_edges, trained_edges = ({edge.key: str(edge.format) for edge in graph.edges} for graph in (rollout, forward))
    shared = served.keys() & trained.keys()
    for source, target, tensor, phase in {**served_edges, **trained_edges}:
        rollout_format, training_format = (edges.get((source, target, tensor, phase), "absent") for edges in (served_edges, trained_edges))
        if rollout_format != training_format and {source, target} <= shared:
            differences.append(_difference(target, source, tensor, rollout_format, training_format))
    return differences


def describe_differences(rollout: PrecisionGraph, training: PrecisionGraph) -> list[str]:
    """Return `compare_graphs` as readable lines; layers that differ alike share one line."""
    layers_by_text: dict[str, list[int | None]] = {}
    for difference in compare_graphs(rollout, training):
        layers_by_text.setdefault(difference.text, []).append(difference.layer)
    return [f"{_layers_prefix(layers)}{text}" for text, layers in layers_by_text.items()]


def split_by_layer(graph: PrecisionGraph) -> dict[int | None, PrecisionGraph]:
    """Return the graph of each layer, with names within the layer; under None what is outside of the layers."""
    nodes: dict[int | None, list[Node]] = {None: []}
    edges: dict[int | None, list[Edge]] = {None: []}
    for node in graph.nodes:
        layer, name = split_layer_name(node.name)
        nodes.setdefault(layer, []).append(replace(node, name=name))
    for edge in graph.edges:
        layer = get_edge_layer(edge)
        source, target = name_within_layer(edge.source, layer), name_within_layer(edge.target, layer)
        edges.setdefault(layer, []).append(replace(edge, source=source, target=target))
    layers = sorted(layer for layer in nodes if layer is not None)
    return {layer: PrecisionGraph(tuple(nodes[layer]), tuple(edges.get(layer, ()))) for layer in (None, *layers)}


def fold_layers(parts: Mapping[int | None, T]) -> list[tuple[tuple[int, ...], T]]:
    """Return (layers, their part) with one entry for layers that are alike; first, with no layers, what is outside of them."""
    alike: dict[T, list[int]] = {}
    for layer in sorted(layer for layer in parts if layer is not None):
        alike.setdefault(parts[layer], []).append(layer)
    return [((), parts[None]), *((tuple(layers), part) for part, layers in alike.items())]


def fold_to_json(graph: PrecisionGraph) -> list[dict[str, Any]]:
    """Return the graph as plain data, with one entry for layers that are alike and an edge's precision as text."""
    return [
        {
            "part": format_title(layers),
            "nodes": [asdict(node) for node in part.nodes],
            "edges": [{**asdict(edge), "format": str(edge.format)} for edge in part.edges],
        }
        for layers, part in fold_layers(split_by_layer(graph))
    ]


def format_title(layers: Sequence[int]) -> str:
    """Return "layers 0..3", or "model" for what is outside of the layers."""
    return format_layers(layers) if layers else "model"


def split_layer_name(name: str) -> tuple[int | None, str]:
    """Return (layer, name within it); (None, name) outside of the layers."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def get_edge_layer(edge: Edge) -> int | None:
    """Return the layer that an edge is listed under: its target's, or its source's where a gradient leaves the layer."""
    backward = edge.source.endswith(".backward") and edge.target.endswith(".backward")
    return split_layer_name(edge.source if backward else edge.target)[0]


def name_within_layer(name: str, layer: int | None) -> str:
    """Return a name as seen from a layer: its input is `input`, whichever layer it comes from, its gradient `input.backward`."""
    owner, inner = split_layer_name(name)
    if layer is None:
        return "last layer" if owner is not None else name
    if owner == layer:
        return inner
    return "input.backward" if name.endswith(".backward") else "input"


def format_layers(layers: Sequence[int]) -> str:
    """Return "layers 0..3, 5"."""
    return format_numbers("layer", layers, "..")


def _difference(name: str, source: str, tensor: str, in_rollout: str, in_training: str) -> GraphDifference:
    layer, inner = split_layer_name(name)
    subject = f"{name_within_layer(source, layer)} -> {inner} ({tensor})" if tensor else inner
    return GraphDifference(layer, f"{subject} is {in_rollout} in the rollout, {in_training} in training")


def _layers_prefix(layers: Sequence[int | None]) -> str:
    numbers = [layer for layer in layers if layer is not None]
    return f"{format_layers(numbers)}: " if numbers else ""
