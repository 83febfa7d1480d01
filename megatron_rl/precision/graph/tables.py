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
    """Return (layers, (training part, rollout part)), one entry for layers that are alike on both sides."""
    trained, served, empty = split_by_layer(training), split_by_layer(rollout), PrecisionGraph((), ())
    return fold_layers({layer: (trained.get(layer, empty), served.get(layer, empty)) for layer in {**trained, **served}})


def join_edges(pair: Pair) -> list[tuple[Edge | None, Edge | None]]:
    """Match the forward edges of both sides: (training, rollout), None where a side has none."""
    trained, served = ({edge.key: edge for edge in graph.edges if edge.phase == FORWARD} for graph in pair)
    return [(trained.get(key), served.get(key)) for key in {**trained, **served}]


def print_graphs(training: PrecisionGraph, rollout: PrecisionGraph, console: Console | None = None) -> None:
    """Print one table per kind of layer, and the backward pass of the trainer's linear layers."""
    console = console or Console()
    for layers, pair in join_parts(training, rollout):
        table = Table(
            "tensor", "training", "rollout", title=f"{format_title(layers)}: forward", title_justify="left", box=None, pad_edge=False
        )
        for trained, served in join_edges(pair):
            if edge := trained or served:
                alike = trained is not None and served is not None and trained.format == served.format
                table.add_row(_edge_name(edge), _format_text(trained, alike), _format_text(served, alike))
        console.print(table, Text())
        backward = Table("product", "operands", title=f"{format_title(layers)}: backward", title_justify="left", box=None, pad_edge=False)
        for node, operands in collect_backward_products(pair[0]):
            backward.add_row(node, ", ".join(f"{edge.tensor} {edge.format}" for edge in operands))
        if backward.row_count:
            console.print(backward, Text())


def collect_backward_products(part: PrecisionGraph) -> list[tuple[str, list[Edge]]]:
    """Return DGrad and WGrad of every linear layer with their operands, each tensor once."""
    products = []
    for node in part.nodes:
        if node.op in ("dgrad", "wgrad"):
            incoming = {(edge.tensor, edge.format): edge for edge in part.edges if edge.target == node.name}
            products.append((node.name, list(incoming.values())))
    return products


def _edge_name(edge: Edge) -> str:
    weight = f"{edge.target}.{edge.tensor}"
    return weight if edge.source == weight else f"{edge.source} -> {edge.target} ({edge.tensor})"


def _format_text(edge: Edge | None, alike: bool) -> Text:
    if edge is None:
        return Text(_ABSENT, "bold red")
    return Text(str(edge.format), "bold red" if not alike else "dark_orange" if edge.format.quantized else "")
