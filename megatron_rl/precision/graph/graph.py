"""The precision graph: operators and weights are nodes, the tensors between them are edges that carry a precision.

An edge states how its target consumes a tensor: "e4m3 1x128 pow2" into a linear layer means that the layer quantizes its input in groups of
128 with power-of-two scales. The rollout's graph must be a subgraph of the training graph's forward pass, operator by operator and edge by
edge (Jet-RL, arXiv 2601.14243). This module does not import torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
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
    """The precision of a tensor."""

    dtype: str  # "bf16", "e4m3"
    granularity: str = ""  # block that shares a scale, if quantized
    scale: str = ""  # format of the scales

    def __str__(self) -> str:
        return " ".join(filter(None, (self.dtype, self.granularity, self.scale)))

    @property
    def quantized(self) -> bool:
        return bool(self.granularity)


@dataclass(frozen=True)
class Node:
    """An operator or a weight. `count` is the number of equal experts. `detail`, the class of the module, is shown but not compared."""

    name: str
    op: str
    count: int = 1
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.op} x{self.count}" if self.count > 1 else self.op


@dataclass(frozen=True)
class Edge:
    """A tensor between two nodes. Phases: forward, dgrad (activation gradients), wgrad (weight gradients), update (master to weight)."""

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
        edges = tuple(edge for edge in self.edges if edge.phase == FORWARD)
        used = {name for edge in edges for name in (edge.source, edge.target)}
        return PrecisionGraph(tuple(node for node in self.nodes if node.name in used), edges)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PrecisionGraph:
        edges = (Edge(**{**edge, "format": TensorPrecision(**edge["format"])}) for edge in data["edges"])
        return cls(tuple(Node(**node) for node in data["nodes"]), tuple(edges))


def merge_graphs(parts: Iterable[PrecisionGraph]) -> PrecisionGraph:
    """Merge the graphs of the ranks of a model. Raise RunError if two ranks disagree about a node or an edge."""
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


def describe_differences(rollout: PrecisionGraph, training: PrecisionGraph) -> list[str]:
    """Return one line per difference between `rollout` and the forward pass of `training`; layers with the same difference share a line."""
    graphs, layers_by_text = (rollout, training.select_forward()), dict[str, list[int]]()
    nodes = [{node.name: str(node) for node in graph.nodes} for graph in graphs]
    edges = [{edge.key: str(edge.format) for edge in graph.edges} for graph in graphs]
    entries = [((name, name, ""), [side.get(name, "absent") for side in nodes]) for name in nodes[0] | nodes[1]]
    for key in edges[0] | edges[1]:
        if set(key[:2]) <= nodes[0].keys() & nodes[1].keys():  # else the node is the difference
            entries.append((key[:3], [side.get(key, "absent") for side in edges]))
    for (source, target, tensor), (in_rollout, in_training) in entries:
        if in_rollout != in_training:
            layer, inner = _split_name(target)
            subject = f"{_name_within_layer(source, layer)} -> {inner} ({tensor})" if tensor else inner
            layers = layers_by_text.setdefault(f"{subject} is {in_rollout} in the rollout, {in_training} in training", [])
            layers.extend([] if layer is None else [layer])
    return [f"{format_title(layers)}: {text}" if layers else text for text, layers in layers_by_text.items()]


def split_by_layer(graph: PrecisionGraph) -> dict[int | None, PrecisionGraph]:
    """Return the graph of each layer, with names within the layer; under None, the graph outside of the layers."""
    nodes, edges = defaultdict[int | None, list[Node]](list), defaultdict[int | None, list[Edge]](list)
    for node in graph.nodes:
        layer, name = _split_name(node.name)
        nodes[layer].append(replace(node, name=name))
    for edge in graph.edges:  # listed under the layer of its target, or of its source if a gradient leaves the layer
        backward = edge.source.endswith(".backward") and edge.target.endswith(".backward")
        layer, _ = _split_name(edge.source if backward else edge.target)
        source, target = _name_within_layer(edge.source, layer), _name_within_layer(edge.target, layer)
        edges[layer].append(replace(edge, source=source, target=target))
    layers = sorted(layer for layer in nodes if layer is not None)
    return {layer: PrecisionGraph(tuple(nodes[layer]), tuple(edges[layer])) for layer in (None, *layers)}


def fold_layers(parts: Mapping[int | None, T]) -> list[tuple[tuple[int, ...], T]]:
    """Return (layers, part) with one entry for equal layers. The first entry, without layers, is the part outside of the layers."""
    equal = defaultdict[T, list[int]](list)
    for layer in sorted(layer for layer in parts if layer is not None):
        equal[parts[layer]].append(layer)
    return [((), parts[None]), *((tuple(layers), part) for part, layers in equal.items())]


def fold_to_json(graph: PrecisionGraph) -> list[dict[str, Any]]:
    """Return the graph as plain data, with one entry for equal layers and precisions as text."""
    parts = []
    for layers, part in fold_layers(split_by_layer(graph)):
        edges = [{**asdict(edge), "format": str(edge.format)} for edge in part.edges]
        parts.append({"part": format_title(layers), "nodes": [asdict(node) for node in part.nodes], "edges": edges})
    return parts


def format_title(layers: Sequence[int]) -> str:
    """Return "layers 0..3, 5", or "model" for the part outside of the layers."""
    return format_numbers("layer", layers, "..") if layers else "model"


def _split_name(name: str) -> tuple[int | None, str]:
    """Return (layer, name within the layer), or (None, name) outside of the layers."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def _name_within_layer(name: str, layer: int | None) -> str:
    """Return a name as seen from a layer. The input of a layer is `input`, whichever layer produces it."""
    owner, inner = _split_name(name)
    if layer is None:
        return "last layer" if owner is not None else name
    if owner == layer:
        return inner
    return "input.backward" if name.endswith(".backward") else "input"
