"""The precision graph: operators and weights are nodes, the tensors between them are edges that carry a precision.

An edge tells how its target consumes a tensor: "e4m3 1x128 pow2" into a linear layer means that the layer quantises its input in
groups of 128 with power-of-two scales. Trainer and engine are each read from their live modules (`mcore/graph.py`,
`rollout_sglang/precision_graph.py`) into the same vocabulary, so that the two can be compared: the rollout's graph must be a subgraph of
the
training graph's forward pass, operator by operator and edge by edge (Jet-RL, arXiv 2601.14243). No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")
FORWARD = "forward"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorFormat:
    """The precision of a tensor: `dtype` ("bf16", "e4m3"), and for a quantised one the block of one scale and the scales' format."""

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
    """An operator or a weight. `count`: how many alike, for experts. `detail`, the module's class, is told but not compared."""

    name: str
    op: str
    count: int = 1
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.op} x{self.count}" if self.count > 1 else self.op


@dataclass(frozen=True)
class Edge:
    """A tensor on its way. `phase`: forward, dgrad (gradients of activations), wgrad (of weights) or update (master to weight)."""

    source: str
    target: str
    tensor: str
    format: TensorFormat
    phase: str = FORWARD

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.source, self.target, self.tensor, self.phase


@dataclass(frozen=True)
class PrecisionGraph:
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def select_forward(self) -> PrecisionGraph:
        """The part that runs in a forward pass."""
        edges = tuple(edge for edge in self.edges if edge.phase == FORWARD)
        used = {name for edge in edges for name in (edge.source, edge.target)}
        return PrecisionGraph(tuple(node for node in self.nodes if node.name in used), edges)

    def to_json(self) -> dict[str, Any]:
        return {"nodes": [asdict(node) for node in self.nodes], "edges": [asdict(edge) for edge in self.edges]}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> PrecisionGraph:
        edges = (Edge(**{**edge, "format": TensorFormat(**edge["format"])}) for edge in told["edges"])
        return cls(tuple(Node(**node) for node in told["nodes"]), tuple(edges))


def merge_graphs(parts: Iterable[PrecisionGraph]) -> PrecisionGraph:
    """The whole graph of a model whose ranks each read their part. Raises ValueError where two ranks tell a part differently."""
    nodes: dict[str, Node] = {}
    edges: dict[tuple[str, ...], Edge] = {}
    for part in parts:
        for node in part.nodes:
            if nodes.setdefault(node.name, node) != node:
                raise ValueError(f"ranks disagree about {node.name}: {nodes[node.name]} and {node}")
        for edge in part.edges:
            if (other := edges.setdefault(edge.key, edge)) != edge:
                raise ValueError(f"ranks disagree about {_arrow(edge)}: {other.format} and {edge.format}")
    return PrecisionGraph(tuple(nodes.values()), tuple(edges.values()))


@dataclass(frozen=True)
class GraphDifference:
    """Something the two graphs do not share. `layer` is None outside of the layers; names in `node` and `text` are within the layer."""

    layer: int | None
    node: str
    text: str


def compare_graphs(rollout: PrecisionGraph, training: PrecisionGraph) -> list[GraphDifference]:
    """What keeps `rollout` from being a subgraph of `training`'s forward pass, or leaves a part of that pass out. [] when all is shared."""
    forward = training.select_forward()
    ours, theirs = ({node.name: node for node in graph.nodes} for graph in (rollout, forward))
    found = []
    for name in _union(ours, theirs):
        here, there = (str(nodes[name]) if name in nodes else "absent" for nodes in (ours, theirs))
        if here != there:
            found.append(_difference(name, name, "", here, there))
    shared = ours.keys() & theirs.keys()
    rollout_edges, training_edges = ({edge.key: edge for edge in graph.edges} for graph in (rollout, forward))
    for key in _union(rollout_edges, training_edges):
        edge = rollout_edges.get(key) or training_edges[key]
        here, there = (str(edges[key].format) if key in edges else "absent" for edges in (rollout_edges, training_edges))
        if here != there and {edge.source, edge.target} <= shared:
            found.append(_difference(edge.target, edge.source, edge.tensor, here, there))
    return found


def describe_differences(rollout: PrecisionGraph, training: PrecisionGraph) -> list[str]:
    """`compare_graphs` as readable lines; layers that differ alike share one line."""
    layers_of: dict[str, list[int | None]] = {}
    for difference in compare_graphs(rollout, training):
        layers_of.setdefault(difference.text, []).append(difference.layer)
    return [f"{_places(layers)}{text}" for text, layers in layers_of.items()]


def split_by_layer(graph: PrecisionGraph) -> dict[int | None, PrecisionGraph]:
    """The graph layer by layer, names within the layer; under None what lies outside of the layers."""
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


def fold_layers(of_layer: Mapping[int | None, T]) -> list[tuple[tuple[int, ...], T]]:
    """(layers, what they share) for layers that are alike; first, with no layers, what lies outside of them."""
    alike: dict[T, list[int]] = {}
    for layer in sorted(layer for layer in of_layer if layer is not None):
        alike.setdefault(of_layer[layer], []).append(layer)
    return [((), of_layer[None]), *((tuple(layers), thing) for thing, layers in alike.items())]


def fold_to_json(graph: PrecisionGraph) -> list[dict[str, Any]]:
    """The graph as plain data, layers that are alike told once and an edge's precision as text."""
    return [
        {
            "part": format_title(layers),
            "nodes": [asdict(node) for node in part.nodes],
            "edges": [{**asdict(edge), "format": str(edge.format)} for edge in part.edges],
        }
        for layers, part in fold_layers(split_by_layer(graph))
    ]


def format_title(layers: Sequence[int]) -> str:
    """ "layers 0..3", or "model" for what lies outside of the layers."""
    return format_layers(layers) if layers else "model"


def split_layer_name(name: str) -> tuple[int | None, str]:
    """(layer, name within it); (None, name) outside of the layers."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def get_edge_layer(edge: Edge) -> int | None:
    """The layer an edge is told with: its target's; its source's where a gradient leaves the layer."""
    back = edge.source.endswith(".backward") and edge.target.endswith(".backward")
    return split_layer_name(edge.source if back else edge.target)[0]


def name_within_layer(name: str, layer: int | None) -> str:
    """A name as seen from a layer: what enters it is `input`, whichever layer made it, and the way back leaves it there."""
    place, inner = split_layer_name(name)
    if layer is None:
        return "last layer" if place is not None else name
    if place == layer:
        return inner
    return "input.backward" if name.endswith(".backward") else "input"


def format_layers(layers: Sequence[int]) -> str:
    """ "layers 0..3, 5" """
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return f"{'layer' if len(layers) == 1 else 'layers'} {text}"


def _union(first: Iterable[Any], second: Iterable[Any]) -> Iterator[Any]:
    """Both sets of keys, each key once, in order of appearance."""
    return iter(dict.fromkeys([*first, *second]))


def _difference(name: str, source: str, tensor: str, here: str, there: str) -> GraphDifference:
    layer, inner = split_layer_name(name)
    what = f"{name_within_layer(source, layer)} -> {inner} ({tensor})" if tensor else inner
    return GraphDifference(layer, inner, f"{what} is {here} in the rollout, {there} in training")


def _places(layers: Sequence[int | None]) -> str:
    numbers = [layer for layer in layers if layer is not None]
    return f"{format_layers(numbers)}: " if numbers else ""


def _arrow(edge: Edge) -> str:
    return f"{edge.source} -> {edge.target} ({edge.tensor})"
