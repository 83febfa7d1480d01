"""Renders both precision graphs as tables, one per kind of layer with a row per tensor, for a terminal or as an SVG image."""

import io

from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from megatron_rl.precision.graph.graph import FORWARD, PrecisionGraph, compare_kernels, describe_differences, fold_layers, format_title
from megatron_rl.precision.graph.kernels import SAME_KERNEL, SAME_ORDER

_SVG = """<svg viewBox="0 0 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }} {styles}</style>
<defs>{lines}</defs><g class="{unique_id}-matrix">{backgrounds}{matrix}</g></svg>"""
"""Rich's own template draws a window around the text and loads fonts from the network."""


def print_graphs(training: PrecisionGraph, rollout: PrecisionGraph, console: Console) -> None:
    """Print the forward pass of both sides for every kind of layer, orange where quantized and red where the two differ, and the backward
    pass of the trainer's linear layers."""
    for layers, (train, serve) in fold_layers(training, rollout):
        forward, backward = (
            Table(*columns, title=f"{format_title(layers)}: {phase}", title_justify="left", box=None, pad_edge=False)
            for phase, *columns in (("forward", "tensor", "training", "rollout"), ("backward", "product", "operands"))
        )
        edges = [{edge.key: edge.format for edge in graph.edges if edge.phase == FORWARD} for graph in (train, serve)]
        for key in edges[0] | edges[1]:
            source, target, tensor, _ = key
            formats = edges[0].get(key), edges[1].get(key)
            name = source if source == f"{target}.{tensor}" else f"{source} -> {target} ({tensor})"
            quantized = formats[0] is not None and formats[0].granularity
            style = "bold red" if formats[0] != formats[1] else "dark_orange" if quantized else ""
            forward.add_row(name, *(Text(str(format or "-"), style) for format in formats))
        for node in train.nodes:
            if node.op in ("dgrad", "wgrad"):
                operands = {f"{edge.tensor} {edge.format}": None for edge in train.edges if edge.target == node.name}
                backward.add_row(node.name, ", ".join(operands))
        for table in (forward, backward):
            if table.row_count:
                console.print(table, Text())
    print_kernels(training, rollout, console)


def print_kernels(training: PrecisionGraph, rollout: PrecisionGraph, console: Console) -> None:
    """Print the verdict about the kernels of each operator, and both kernels if they are not the same."""
    table = Table("operator", "verdict", "training", "rollout", title="kernels", title_justify="left", box=None, pad_edge=False)
    for each in compare_kernels(rollout, training):
        if each.training is each.rollout is None:  # graphs that were not read from live models
            continue
        style = {SAME_KERNEL: "", SAME_ORDER: "dark_orange"}.get(each.verdict, "bold red")
        names = [kernel.name if kernel else "unknown" for kernel in (each.training, each.rollout)]
        table.add_row(each.operator, Text(each.verdict, style), names[0], "" if each.verdict == SAME_KERNEL else names[1])
    if table.row_count:
        console.print(table, Text())


def draw_svg(training: PrecisionGraph, rollout: PrecisionGraph) -> str:
    """Return the tables of `print_graphs` as an SVG element, with the number of differences above them."""
    console = Console(record=True, width=150, file=io.StringIO(), force_terminal=True)
    count = len(describe_differences(rollout, training))
    verdict = Text("The rollout is a subgraph of the training's forward pass.")
    console.print(Text(f"{count} difference{'s' * (count > 1)}", "bold red") if count else verdict, Text())
    print_graphs(training, rollout, console)
    return console.export_svg(title="", code_format=_SVG, theme=DEFAULT_TERMINAL_THEME, unique_id="precision-graph")
