"""Draws one layer of both precision graphs, with the model's ends, as an SVG: backward, training and rollout side by side.

Operators stand in a column in the order in which they run, weights at their left. A tensor that skips operators takes a lane at the
right. FP8 is coloured; what the two sides do not share is red.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise

from megatron_rl.precision.graph.graph import FORWARD, Edge, Node, PrecisionGraph, compare_graphs, describe_differences, format_title
from megatron_rl.precision.graph.tables import collect_backward_products, join_parts

_ROW, _TOP, _LANE = 62, 110, 24
_BOX, _WEIGHT = (184, 30), (74, 22)
_BACKWARD, _COLUMNS, _WIDTH = 24, {"training": 764, "rollout": 1330}, 1660
"""Left edge of the backward products; centres of the two columns of operators."""
_FP8, _HIGH, _WRONG, _INK = "#d9730d", "#7a7f87", "#d11a2a", "#1f2328"


@dataclass(frozen=True)
class _View:
    """One layer between the model's ends, as one small graph per side."""

    layers: tuple[int, ...]
    sides: dict[str, PrecisionGraph]
    backward: dict[str, list[tuple[str, list[Edge]]]]
    """Of a linear operator: its products, each with what it multiplies."""
    wrong: set[tuple[str, str, str]]
    """(source, target, tensor) of edges, and (name, "", "") of operators, that the sides do not share."""


@dataclass
class _Canvas:
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, size: tuple[int, int], text: str, colour: str, fill: str = "#ffffff") -> None:
        """A box centred at (x, y)."""
        width, height = size
        place = f'x="{x - width / 2}" y="{y - height / 2}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {place} rx="5" fill="{fill}" stroke="{colour}"/>')
        self.text(x, y + 4, text, anchor="middle")

    def text(self, x: float, y: float, text: str, colour: str = _INK, anchor: str = "start", size: int = 12) -> None:
        style = f'font-size="{size}" text-anchor="{anchor}" paint-order="stroke" stroke="#ffffff" stroke-width="3"'
        self.parts.append(f'<text x="{x}" y="{y}" fill="{colour}" {style}>{escape(text)}</text>')

    def line(self, points: list[tuple[float, float]], colour: str) -> None:
        """An arrow along `points`."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#{colour[1:]})"/>')


def draw_svg(training: PrecisionGraph, rollout: PrecisionGraph) -> str:
    """The SVG's text. The layer drawn is one that differs where there is one, else one of the most common kind."""
    view = _view(training, rollout)
    rows: dict[str, float] = {}
    for graph in view.sides.values():
        for node in _operators(graph):
            rows.setdefault(node.name, _TOP + _ROW * len(rows))
    canvas = _Canvas()
    _header(canvas, len(describe_differences(rollout, training)))
    _frame(canvas, view, rows)
    for name, products in view.backward.items():
        _products(canvas, rows[name], products)
    for side, graph in view.sides.items():
        _column(canvas, _COLUMNS[side], graph, rows, view.wrong)
    height = _TOP + _ROW * len(rows)
    markers = "".join(
        f'<marker id="{colour[1:]}" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0,1 L8,4 L0,7 z" fill="{colour}"/></marker>'
        for colour in (_FP8, _HIGH, _WRONG)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif"><defs>{markers}</defs><rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
        + "\n".join(canvas.parts)
        + "</svg>\n"
    )


def _view(training: PrecisionGraph, rollout: PrecisionGraph) -> _View:
    differing = {difference.layer for difference in compare_graphs(rollout, training)}
    (_, ends), *kinds = join_parts(training, rollout)
    layers, layer = max(kinds, key=lambda kind: (bool(differing & set(kind[0])), len(kind[0])))
    sides = {side: _joined(*graphs) for side, *graphs in zip(_COLUMNS, ends, layer, strict=True)}
    backward: dict[str, list[tuple[str, list[Edge]]]] = {}
    for part in (ends[0], layer[0]):
        for name, operands in collect_backward_products(part):
            backward.setdefault(name.rpartition(".")[0], []).append((name.rpartition(".")[2], operands))
    drawn = [edge for graph in sides.values() for edge in graph.edges]
    shared = [{(edge.source, edge.target, edge.tensor, edge.format) for edge in graph.edges} for graph in sides.values()]
    wrong = {
        (edge.source, edge.target, edge.tensor)
        for edge in drawn
        if not all((edge.source, edge.target, edge.tensor, edge.format) in found for found in shared)
    }
    wrong |= {(name, "", "") for name in _unshared(sides.values())}
    return _View(layers, sides, backward, wrong)


def _unshared(sides: Iterable[PrecisionGraph]) -> set[str]:
    """Operators that not every side has alike."""
    ours, theirs = ({(node.name, node.op, node.count) for node in graph.nodes} for graph in sides)
    return {name for name, _, _ in ours ^ theirs}


def _joined(ends: PrecisionGraph, layer: PrecisionGraph) -> PrecisionGraph:
    """The embedding, one layer, and what follows: what entered the layer comes from the embedding, what left it is the last layer."""
    names = {"input": "embedding", "last layer": "mlp.residual"}
    edges = [replace(edge, source=names.get(edge.source, edge.source)) for edge in (*ends.edges, *layer.edges) if edge.phase == FORWARD]
    used = {name for edge in edges for name in (edge.source, edge.target)}
    first = [node for node in ends.nodes if node.name.startswith("embedding")]
    rest = [node for node in ends.nodes if not node.name.startswith("embedding")]
    return PrecisionGraph(tuple(node for node in (*first, *layer.nodes, *rest) if node.name in used), tuple(edges))


def _operators(graph: PrecisionGraph) -> list[Node]:
    return [node for node in graph.nodes if node.op != "weight"]


def _header(canvas: _Canvas, wrong: int) -> None:
    canvas.text(_BACKWARD, 30, "Precision graph", size=18)
    verdict = "the rollout is a subgraph of the training's forward pass" if not wrong else f"{wrong} difference{'s' * (wrong > 1)}"
    canvas.text(_BACKWARD + 150, 30, verdict, _WRONG if wrong else _INK, size=14)
    for place, (colour, text) in enumerate(
        ((_FP8, "quantised: dtype, what has one scale, scale format"), (_HIGH, "high precision"), (_WRONG, "differs"))
    ):
        x = _BACKWARD + 330 * place
        canvas.line([(x, 54), (x + 34, 54)], colour)
        canvas.text(x + 42, 58, text)
    canvas.text(_BACKWARD, _TOP - 26, "training, backward", size=14)
    for side, centre in _COLUMNS.items():
        canvas.text(centre, _TOP - 26, f"{side}, forward", anchor="middle", size=14)


def _frame(canvas: _Canvas, view: _View, rows: dict[str, float]) -> None:
    """A tinted band behind the layer's operators, with the layers that are alike as its name."""
    inside = [y for name, y in rows.items() if "." in name or name in ("input_norm", "post_attention_norm")]
    top, bottom = min(inside) - _ROW / 2 + 2, max(inside) + _ROW / 2 - 6
    canvas.parts.append(f'<rect x="8" y="{top}" width="{_WIDTH - 16}" height="{bottom - top}" rx="8" fill="#f6f7f9"/>')
    canvas.text(_BACKWARD, top + 18, format_title(view.layers), size=13)


def _products(canvas: _Canvas, y: float, products: list[tuple[str, list[Edge]]]) -> None:
    """DGrad and WGrad of one linear operator: what they multiply."""
    for row, (name, operands) in enumerate(products):
        height = y - 6 + 20 * row
        canvas.text(_BACKWARD + 20, height, "DGrad" if name == "backward" else "WGrad")
        x = _BACKWARD + 74
        for edge in operands:
            canvas.text(x, height, f"{edge.tensor} {edge.format}", _colour(edge, set()))
            x += 190


def _column(canvas: _Canvas, centre: float, graph: PrecisionGraph, rows: dict[str, float], wrong: set[tuple[str, str, str]]) -> None:
    weights = {node.name for node in graph.nodes if node.op == "weight"}
    operators = _operators(graph)
    before = {node.name: previous.name for previous, node in pairwise(operators)}
    lanes: list[float] = []
    for edges in _bundles(graph.edges):
        edge = edges[0]
        colour = next((_WRONG for one in edges if _colour(one, wrong) == _WRONG), _colour(edge, wrong))
        named = ", ".join(one.tensor for one in edges)
        text = str(edge.format) if named in ("x", "weight") else f"{named} {edge.format}"
        top, bottom = rows[edge.source] if edge.source not in weights else rows[edge.target], rows[edge.target]
        if edge.source in weights:
            _weight(canvas, centre, bottom + (18 if edge.tensor == "bias" else 0), edge, colour)
        elif before.get(edge.target) == edge.source:
            canvas.line([(centre, top + 15), (centre, bottom - 16)], colour)
            canvas.text(centre + 7, (top + bottom) / 2 + 4, text, colour)
        else:
            _lane(canvas, centre, (top, bottom), lanes, text, colour)
    for node in operators:
        label = f"{node.name} x{node.count}" if node.count > 1 else node.name
        colour = _WRONG if (node.name, "", "") in wrong else _INK
        canvas.box(centre, rows[node.name], _BOX, label, colour, "#eef3fb")


def _bundles(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Edges between the same two operators in the same precision, drawn as one."""
    found: dict[tuple[object, ...], list[Edge]] = {}
    for edge in edges:
        found.setdefault((edge.source, edge.target, edge.format), []).append(edge)
    return list(found.values())


def _weight(canvas: _Canvas, centre: float, y: float, edge: Edge, colour: str) -> None:
    left = centre - _BOX[0] / 2
    canvas.line([(left - 140, y), (left - 2, y)], colour)
    canvas.box(left - 150 - _WEIGHT[0] / 2 + 10, y, _WEIGHT, edge.tensor, _HIGH)
    canvas.text(left - 134, y - 5, str(edge.format), colour)


def _lane(canvas: _Canvas, centre: float, span: tuple[float, float], lanes: list[float], text: str, colour: str) -> None:
    """An arrow around the operators in between, in the first lane at the right that is free again."""
    top, bottom = span
    place = next((index for index, end in enumerate(lanes) if end < top), len(lanes))
    lanes[place : place + 1] = [bottom]
    right, x = centre + _BOX[0] / 2, centre + _BOX[0] / 2 + 46 + _LANE * place
    canvas.line([(right, top + 8), (x, top + 8), (x, bottom - 8), (right + 2, bottom - 8)], colour)
    canvas.text(x + 5, bottom - 14, text, colour)


def _colour(edge: Edge, wrong: set[tuple[str, str, str]]) -> str:
    if (edge.source, edge.target, edge.tensor) in wrong:
        return _WRONG
    return _FP8 if edge.format.quantized else _HIGH
