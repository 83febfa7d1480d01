"""The precision graph: operators and weights are nodes, the tensors between them are edges that carry a precision.

An edge states how its target consumes a tensor: "e4m3 1x128 pow2" into a linear layer means that the layer quantizes its input in groups of
128 with power-of-two scales. The rollout's graph must be a subgraph of the training graph's forward pass, operator by operator and edge by
edge (Jet-RL, arXiv 2601.14243). This module does not import torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from megatron_rl.errors import RunError
from megatron_rl.precision.graph.kernels import Kernel, Machine, compare, join_machines
from parallel.layout import format_numbers

FORWARD = "forward"
_OUTSIDE = -1  # layer of the operators outside of the layers
_UNKNOWN_MACHINE = Machine()  # of graphs that were not read from live models
_WITHOUT_KERNEL = ("weight", "add")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorPrecision:
    """The precision of a tensor."""

    dtype: str  # "bf16", "e4m3"
    granularity: str = ""  # block that shares a scale, if quantized
    scale: str = ""  # format of the scales

    def __str__(self) -> str:
        return " ".join(filter(None, (self.dtype, self.granularity, self.scale)))


@dataclass(frozen=True)
class Node:
    """An operator or a weight. `count` is the number of equal experts. `detail`, the class of the module, is shown but not compared.
    `compare_kernels` compares `kernel`."""

    name: str
    op: str
    count: int = 1
    detail: str = ""
    kernel: Kernel | None = None

    def __str__(self) -> str:
        return f"{self.op} x{self.count}" if self.count > 1 else self.op

    @property
    def key(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Edge:
    """A tensor between two nodes. Phases: forward, dgrad (activation gradients), wgrad (weight gradients), update (master to weight)."""

    source: str
    target: str
    tensor: str
    format: TensorPrecision
    phase: str = FORWARD

    def __str__(self) -> str:
        return str(self.format)

    @property
    def key(self) -> tuple[str, ...]:
        return self.source, self.target, self.tensor, self.phase


@dataclass(frozen=True)
class PrecisionGraph:
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    machine: Machine = _UNKNOWN_MACHINE

    def select_forward(self) -> PrecisionGraph:
        edges = tuple(edge for edge in self.edges if edge.phase == FORWARD)
        used = {name for edge in edges for name in (edge.source, edge.target)}
        return PrecisionGraph(tuple(node for node in self.nodes if node.name in used), edges, self.machine)


GRAPH_JSON = TypeAdapter(PrecisionGraph)  # a graph as JSON text and back


def merge_graphs(parts: Iterable[PrecisionGraph]) -> PrecisionGraph:
    """Merge the graphs of the ranks of a model. Raise RunError if two ranks disagree about a node or an edge."""
    merged: dict[tuple[str, ...], Node | Edge] = {}
    parts = list(parts)
    for entry in chain[Node | Edge](*(entries for part in parts for entries in (part.nodes, part.edges))):
        if (other := merged.setdefault(entry.key, entry)) != entry:
            subject = " -> ".join(entry.key[:2]) + "".join(f" ({tensor})" for tensor in entry.key[2:3])
            one, two = (str(part) if str(other) != str(entry) else str(getattr(part, "kernel", part)) for part in (other, entry))
            raise RunError(f"the trainer's precision graph: ranks disagree about {subject}: {one} and {two}")
    edges = tuple(entry for entry in merged.values() if isinstance(entry, Edge))
    return PrecisionGraph(
        tuple(entry for entry in merged.values() if isinstance(entry, Node)), edges, join_machines(part.machine for part in parts)
    )


def describe_differences(rollout: PrecisionGraph, training: PrecisionGraph) -> list[str]:
    """Return one line per difference between `rollout` and the forward pass of `training`; layers with the same difference share a line."""
    graphs, layers_by_text = (rollout, training.select_forward()), dict[str, list[int]]()
    sides = [{entry.key: str(entry) for entry in chain[Node | Edge](graph.nodes, graph.edges)} for graph in graphs]
    for key in sides[0] | sides[1]:
        in_rollout, in_training = (side.get(key, "absent") for side in sides)
        tensors = key[2:3]  # of an edge; if one side lacks one of its nodes, that is the difference
        if in_rollout == in_training or (tensors and any((name,) not in side for name in key[:2] for side in sides)):
            continue
        layer, subject = _split_name(key[:2][-1])
        if tensors:
            subject = f"{_name_within_layer(key[0], layer)} -> {subject} ({tensors[0]})"
        layers = layers_by_text.setdefault(f"{subject} is {in_rollout} in the rollout, {in_training} in training", [])
        layers.extend([layer] if layer != _OUTSIDE else [])
    return [f"{format_title(layers)}: {text}" if layers else text for text, layers in layers_by_text.items()]


class KernelVerdict(NamedTuple):
    """Kernels of equal operators of several layers, and whether they are the same."""

    operator: str  # with its layers
    rollout: Kernel | None
    training: Kernel | None
    verdict: str

    def __str__(self) -> str:
        return f"{self.operator}: the engine computes with {self.rollout or 'an unknown kernel'}, the trainer with {self.training}"


def compare_kernels(rollout: PrecisionGraph, training: PrecisionGraph) -> list[KernelVerdict]:
    """Return a verdict for each kind of operator of the rollout, in the order of the graph. Additions to the residual stream, which have
    one rounding and no order, and weights have no kernel."""
    found, own = dict[tuple[Any, ...], list[int]](), {node.name: node.kernel for node in rollout.nodes}
    for node in training.select_forward().nodes:
        if node.op in _WITHOUT_KERNEL or node.name not in own:
            continue
        layer, name = _split_name(node.name)
        found.setdefault((name, own[node.name], node.kernel), []).append(layer)
    verdicts = []
    for (name, engine, trainer), layers in found.items():
        title = "" if layers == [_OUTSIDE] else f"{format_title(layers)}: "
        verdicts.append(KernelVerdict(f"{title}{name}", engine, trainer, compare(engine, trainer)))
    return verdicts


def fold_layers(*graphs: PrecisionGraph) -> list[tuple[tuple[int, ...], list[PrecisionGraph]]]:
    """Return (layers, that part of each graph) with one entry for layers that are equal in every graph, and names within the layer. The
    first entry, without layers, is the part outside of the layers."""
    parts = defaultdict[int, list[tuple[list[Node], list[Edge]]]](lambda: [([], []) for _ in graphs])
    for side, graph in enumerate(graphs):
        for node in graph.nodes:
            layer, name = _split_name(node.name)
            parts[layer][side][0].append(replace(node, name=name))
        for edge in graph.edges:  # listed under the layer of its target, or of its source if a gradient leaves the layer
            backward = edge.source.endswith(".backward") and edge.target.endswith(".backward")
            layer, _ = _split_name(edge.source if backward else edge.target)
            source, target = _name_within_layer(edge.source, layer), _name_within_layer(edge.target, layer)
            parts[layer][side][1].append(replace(edge, source=source, target=target))
    equal = defaultdict[tuple[PrecisionGraph, ...], list[int]](list)
    for layer in sorted(parts):
        equal[tuple(PrecisionGraph(tuple(nodes), tuple(edges)) for nodes, edges in parts[layer])].append(layer)
    return [(tuple(layers) if layers != [_OUTSIDE] else (), list(part)) for part, layers in equal.items()]


def fold_to_json(graph: PrecisionGraph) -> list[dict[str, Any]]:
    """Return the graph as plain data, with one entry for equal layers and precisions as text."""
    parts = []
    for layers, (part,) in fold_layers(graph):
        edges = [{**asdict(edge), "format": str(edge.format)} for edge in part.edges]
        parts.append({"part": format_title(layers), "nodes": [asdict(node) for node in part.nodes], "edges": edges})
    return parts


def format_title(layers: Sequence[int]) -> str:
    """Return "layers 0..3, 5", or "model" for the part outside of the layers."""
    return format_numbers("layer", layers, "..") if layers else "model"


def _split_name(name: str) -> tuple[int, str]:
    """Return (layer, name within the layer)."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (_OUTSIDE, name)


def _name_within_layer(name: str, layer: int) -> str:
    """Return a name as seen from a layer. The input of a layer is `input`, whichever layer produces it."""
    owner, inner = _split_name(name)
    if owner == layer:
        return inner
    if layer == _OUTSIDE:
        return "last layer"
    return "input.backward" if name.endswith(".backward") else "input"
