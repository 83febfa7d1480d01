"""Both precision graphs as tables for a terminal: one row per tensor of the forward pass, trainer and rollout side by side."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.precision.graph.graph import FORWARD, Edge, PrecisionGraph, fold_layers, format_title, split_by_layer

_ABSENT = "-"
Pair = tuple[PrecisionGraph, PrecisionGraph]
"""A part of the training graph and the same part of the rollout's."""


def join_parts(training: PrecisionGraph, rollout: PrecisionGraph) -> list[tuple[tuple[int, ...], Pair]]:
    """(layers, training part, rollout part), layers told once where they are alike on both sides."""
    ours, theirs, empty = split_by_layer(training), split_by_layer(rollout), PrecisionGraph((), ())
    return fold_layers({layer: (ours.get(layer, empty), theirs.get(layer, empty)) for layer in {**ours, **theirs}})


def join_edges(pair: Pair) -> list[tuple[Edge | None, Edge | None]]:
    """The forward edges of both sides, matched: (training, rollout), None where a side has none."""
    ours, theirs = ({edge.key: edge for edge in graph.edges if edge.phase == FORWARD} for graph in pair)
    return [(ours.get(key), theirs.get(key)) for key in {**ours, **theirs}]


def print_graphs(training: PrecisionGraph, rollout: PrecisionGraph, console: Console | None = None) -> None:
    """Prints one table per kind of layer, and the backward pass of the trainer's linear layers."""
    console = console or Console()
    for layers, pair in join_parts(training, rollout):
        table = Table(
            "tensor", "training", "rollout", title=f"{format_title(layers)}: forward", title_justify="left", box=None, pad_edge=False
        )
        for ours, theirs in join_edges(pair):
            edge = ours or theirs
            if edge is not None:
                alike = ours is not None and theirs is not None and ours.format == theirs.format
                table.add_row(_named(edge), _precision(ours, alike), _precision(theirs, alike))
        console.print(table, Text())
        backward = Table("product", "operands", title=f"{format_title(layers)}: backward", title_justify="left", box=None, pad_edge=False)
        for node, operands in collect_backward_products(pair[0]):
            backward.add_row(node, ", ".join(f"{edge.tensor} {edge.format}" for edge in operands))
        if backward.row_count:
            console.print(backward, Text())


def collect_backward_products(part: PrecisionGraph) -> list[tuple[str, list[Edge]]]:
    """DGrad and WGrad of every linear layer with what they multiply, each tensor once."""
    found = []
    for node in part.nodes:
        if node.op in ("dgrad", "wgrad"):
            incoming = {(edge.tensor, edge.format): edge for edge in part.edges if edge.target == node.name}
            found.append((node.name, list(incoming.values())))
    return found


def _named(edge: Edge) -> str:
    weight = f"{edge.target}.{edge.tensor}"
    return weight if edge.source == weight else f"{edge.source} -> {edge.target} ({edge.tensor})"


def _precision(edge: Edge | None, alike: bool) -> Text:
    if edge is None:
        return Text(_ABSENT, "bold red")
    return Text(str(edge.format), "bold red" if not alike else "dark_orange" if edge.format.quantized else "")
