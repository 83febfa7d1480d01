"""Draws one layer of both precision graphs, with the model's ends, as an SVG: backward, training and rollout side by side.

Operators stand in a column in the order in which they run, weights at their left; a tensor that skips operators takes a lane at the
right. FP8 is colored; what the two sides do not share is red.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from megatron_rl.precision.graph.graph import FORWARD, Edge, PrecisionGraph, compare_graphs, describe_differences, format_title
from megatron_rl.precision.graph.tables import collect_backward_products, join_parts

_WIDTH, _HEADER, _ROW, _LANE = 16.6, 1.1, 0.62, 0.24  # inches, as all lengths here
_COLUMNS = {"training": 7.64, "rollout": 13.3}
"""Centers of the two columns of operators."""
_BOX, _WEIGHT_BOX, _WEIGHT_OFFSET = (1.84, 0.3), (0.7, 0.22), 2.64
_FP8, _HIGH, _DIFFERS, _INK = "#d9730d", "#7a7f87", "#d11a2a", "#1f2328"
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "precision graph", "font.family": "sans-serif", "font.size": 8.6, "text.color": _INK}
Unshared = set[tuple[Any, ...]]
"""(source, target, tensor) of edges, and (name,) of operators, that only one side has, or each in its own way."""


def draw_svg(training: PrecisionGraph, rollout: PrecisionGraph) -> str:
    """Return the SVG. The layer drawn is one that differs where there is one, else one of the most common kind."""
    import matplotlib  # here, since only one rank of a run draws
    from matplotlib.figure import Figure

    differing = {difference.layer for difference in compare_graphs(rollout, training)}
    (_, ends), *kinds = join_parts(training, rollout)
    layers, layer = max(kinds, key=lambda kind: (bool(differing & set(kind[0])), len(kind[0])))
    sides = {side: _join(*parts) for side, *parts in zip(_COLUMNS, ends, layer, strict=True)}
    names = dict.fromkeys(node.name for graph in sides.values() for node in graph.nodes if node.op != "weight")
    rows = {name: _HEADER + _ROW * number for number, name in enumerate(names)}
    height = _HEADER + _ROW * len(rows)
    with matplotlib.rc_context(_STYLE):
        figure = Figure((_WIDTH, height))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0))
        axes.axis("off")
        _draw_header(axes, len(describe_differences(rollout, training)))
        _draw_layer_band(axes, format_title(layers), [y for name, y in rows.items() if "." in name or name.endswith("_norm")])
        for part in (ends[0], layer[0]):
            _draw_backward(axes, part, rows)
        for side, graph in sides.items():
            _draw_side(axes, _COLUMNS[side], graph, rows, _find_unshared(*sides.values()))
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()[svg.getvalue().index("<svg") :]  # an element that a page can hold


def _join(ends: PrecisionGraph, layer: PrecisionGraph) -> PrecisionGraph:
    """Return the forward pass of the embedding, one layer, and what follows it, as one graph."""
    sources = {"input": "embedding", "last layer": "mlp.residual"}
    edges = [replace(edge, source=sources.get(edge.source, edge.source)) for edge in (*ends.edges, *layer.edges) if edge.phase == FORWARD]
    used = {name for edge in edges for name in (edge.source, edge.target)}
    first = [node for node in ends.nodes if node.name.startswith("embedding")]
    last = [node for node in ends.nodes if node not in first]
    return PrecisionGraph(tuple(node for node in (*first, *layer.nodes, *last) if node.name in used), tuple(edges))


def _find_unshared(*sides: PrecisionGraph) -> Unshared:
    edges = [{(edge.source, edge.target, edge.tensor, edge.format) for edge in graph.edges} for graph in sides]
    nodes = [{(node.name, node.op, node.count) for node in graph.nodes} for graph in sides]
    return {edge[:3] for edge in edges[0] ^ edges[1]} | {node[:1] for node in nodes[0] ^ nodes[1]}


def _draw_header(axes: Any, differences: int) -> None:
    axes.text(0.24, 0.3, "Precision graph", fontsize=13)
    verdict = (
        f"{differences} difference{'s' * (differences > 1)}" if differences else "the rollout is a subgraph of the training's forward pass"
    )
    axes.text(1.74, 0.3, verdict, fontsize=10, color=_DIFFERS if differences else _INK)
    legend = {_FP8: "quantized: dtype, what has one scale, scale format", _HIGH: "high precision", _DIFFERS: "differs"}
    for x, (color, text) in zip((0.24, 4.2, 6.2), legend.items(), strict=True):
        axes.plot((x, x + 0.34), (0.54, 0.54), color=color)
        axes.text(x + 0.42, 0.58, text)
    axes.text(0.24, _HEADER - 0.26, "training, backward", fontsize=10)
    for side, x in _COLUMNS.items():
        axes.text(x, _HEADER - 0.26, f"{side}, forward", fontsize=10, ha="center")


def _draw_layer_band(axes: Any, title: str, rows: list[float]) -> None:
    """Tint the background of the layer's operators."""
    axes.axhspan(min(rows) - _ROW / 2 + 0.02, max(rows) + _ROW / 2 - 0.06, color="#f6f7f9", zorder=0)
    axes.text(0.24, min(rows) - 0.1, title, fontsize=9.4)


def _draw_backward(axes: Any, part: PrecisionGraph, rows: dict[str, float]) -> None:
    """Write what DGrad and WGrad of every linear operator multiply."""
    for name, operands in collect_backward_products(part):
        operator, _, product = name.rpartition(".")
        y = rows[operator] + (0.14 if product == "wgrad" else -0.06)
        axes.text(0.44, y, "WGrad" if product == "wgrad" else "DGrad")
        for number, edge in enumerate(operands):
            axes.text(0.98 + 1.9 * number, y, f"{edge.tensor} {edge.format}", color=_color(edge))


def _draw_side(axes: Any, x: float, graph: PrecisionGraph, rows: dict[str, float], unshared: Unshared) -> None:
    operators = [node for node in graph.nodes if node.op != "weight"]
    consecutive = set(pairwise(node.name for node in operators))
    lane_ends: list[float] = []
    for edges in _bundle(graph.edges):
        source, target, text, color = edges[0].source, edges[0].target, str(edges[0].format), _color(edges[0])
        if any((edge.source, edge.target, edge.tensor) in unshared for edge in edges):
            color = _DIFFERS
        tensors = ", ".join(edge.tensor for edge in edges)
        if tensors not in ("x", "weight"):
            text = f"{tensors} {text}"
        top, bottom, left, right = rows.get(source, 0.0), rows[target], x - _BOX[0] / 2, x + _BOX[0] / 2
        if source not in rows:
            y, start = bottom + 0.18 * (edges[0].tensor == "bias"), x - _WEIGHT_OFFSET
            _draw_box(axes, start, y, _WEIGHT_BOX, edges[0].tensor, _HIGH, "#ffffff")
            _draw_arrow(axes, (start + _WEIGHT_BOX[0] / 2, y), (left, y), color)
            axes.text(start + 0.42, y - 0.05, str(edges[0].format), color=color)
        elif (source, target) in consecutive:
            _draw_arrow(axes, (x, top + _BOX[1] / 2), (x, bottom - _BOX[1] / 2), color)
            axes.text(x + 0.07, (top + bottom) / 2 + 0.04, text, color=color)
        else:  # around the operators in between, in the first lane that is free again
            lane = next((number for number, end in enumerate(lane_ends) if end < top), len(lane_ends))
            lane_ends[lane : lane + 1] = [bottom]
            offset = 0.46 + _LANE * lane
            bar = f"bar,fraction={-offset / (bottom - top - 0.16)}"
            _draw_arrow(axes, (right, top + 0.08), (right, bottom - 0.08), color, bar)
            axes.text(right + offset + 0.05, bottom - 0.14, text, color=color)
    for node in operators:
        label = f"{node.name} x{node.count}" if node.count > 1 else node.name
        _draw_box(axes, x, rows[node.name], _BOX, label, _DIFFERS if (node.name,) in unshared else _INK, "#eef3fb")


def _draw_box(axes: Any, x: float, y: float, size: tuple[float, float], text: str, color: str, fill: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner, style = (x - size[0] / 2, y - size[1] / 2), "round,pad=0,rounding_size=0.05"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=style, facecolor=fill, edgecolor=color, zorder=3))
    axes.text(x, y + 0.04, text, ha="center", zorder=4)


def _draw_arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str, path: str = "arc3") -> None:
    style = dict(arrowstyle="-|>", color=color, linewidth=1.2, shrinkA=0, shrinkB=0, connectionstyle=path)
    axes.annotate("", end, start, arrowprops=style)


def _bundle(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Group edges between the same two operators in the same precision, which are drawn as one."""
    bundles: dict[tuple[object, ...], list[Edge]] = {}
    for edge in edges:
        bundles.setdefault((edge.source, edge.target, edge.format), []).append(edge)
    return list(bundles.values())


def _color(edge: Edge) -> str:
    return _FP8 if edge.format.quantized else _HIGH
