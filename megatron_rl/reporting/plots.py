"""The report's plots, drawn by matplotlib as small inline SVGs.

Every color drawn here is a placeholder that is replaced by a CSS variable of the page, so a plot is legible on light and on dark pages.
Series differ in marker and dash as well as in color.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from megatron_rl.metrics import STEP_SECONDS, Declarations, Metric, MetricValue, describe, group_by_panel
from megatron_rl.reporting.formatting import format_bytes

if TYPE_CHECKING:  # matplotlib is imported only by the rank that draws
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, MetricValue]]

# Placeholder -> CSS color. The page defines --s1.. for light and dark after Okabe and Ito's palette for color-blind readers.
_INK, _GRID, _PAPER = "#010101", "#020202", "#030303"
_SERIES = [f"#0000{10 + number:02d}" for number in range(8)]
_CSS = {_INK: "var(--ink)", _GRID: "var(--grid)", _PAPER: "var(--card)"}
_CSS |= {placeholder: f"var(--s{number})" for number, placeholder in enumerate(_SERIES, 1)}
_MARKERS = "osD^vPX*"
_MARKED = 60  # lines with more points have no markers
_DASHES = ["-", "--", ":", "-.", "-", "--", ":", "-."]
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "megatron-rl", "font.size": 9, "axes.titlesize": 9, "text.color": _INK, "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID, "xtick.color": _INK, "ytick.color": _INK, "axes.grid": True, "grid.color": _GRID, "grid.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "lines.linewidth": 1.6, "legend.frameon": False,
    "text.parse_math": False, "xtick.major.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Its series are the metrics that declare its label. `draw` replaces the default line plot."""

    ylabel: str
    kind: str = "number"  # "number" | "share" (0..1, shown in percent) | "bytes" | "log"
    zero: bool = False  # the axis starts at 0
    legend: bool = False  # show a legend even for a single series
    draw: Callable[[Axes, Rows, Panel], None] | None = None
    series: tuple[tuple[str, str], ...] = ()  # (metric, label)


@dataclass(frozen=True)
class Plot:
    """One card of the report: a title, a caption that says what to look for, and one or more panels over the same steps."""

    title: str
    panels: tuple[Panel, ...]
    caption: str = ""


def fill_sections(rows: Rows, declared: Declarations) -> dict[str, list[Plot]]:
    """Return the plots of `SECTIONS` with the series that the rows' metrics declare, in the order of the row with the most metrics. Panels
    that are not in `SECTIONS` are added as plots of their own. Without declarations there are no plots."""
    names = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    metrics = [metric for name in names if (metric := describe(name, declared))]

    def fill(panel: Panel) -> Panel:
        return replace(panel, series=tuple((metric.name, metric.label) for metric in metrics if panel.ylabel in metric.panels))

    sections = {title: list(plots) for title, plots in SECTIONS.items()} if declared else {}
    known = {panel.ylabel for plots in SECTIONS.values() for plot in plots for panel in plot.panels}
    further = [_make_plot(panel, members) for panel, members in group_by_panel(declared).items() if panel not in known]
    sections |= {"Further metrics": further} if further else {}
    return {title: [replace(plot, panels=tuple(map(fill, plot.panels))) for plot in plots] for title, plots in sections.items()}


def _make_plot(panel: str, metrics: Sequence[Metric]) -> Plot:
    unit, caption = metrics[0].unit, "; ".join(metric.meaning for metric in metrics)
    axes = Panel(panel, unit if unit in ("share", "bytes") else "number", zero=unit in ("bytes", "count", "MiB", "seconds"))
    return Plot(panel, (axes,), f"{caption[:1].upper()}{caption[1:]}.")


def finite_values(rows: Rows, key: str) -> list[float]:
    """Return the finite values of a metric; rows without a value, or with None, are skipped."""
    return [value for row in rows if (value := row.get(key)) is not None]


def render_svg(plot: Plot, rows: Rows, xlabel: str = "step") -> str:
    """Return the plot as an inline `<svg>` element, or "" if it has no series. The x axis is the rows' "step"."""
    panels = [panel for panel in plot.panels if panel.series]
    if not panels:
        return ""

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for panel, ax in zip(panels, axes, strict=True):
            if panel.draw:
                panel.draw(ax, rows, panel)
            else:
                _draw_lines(ax, rows, panel)
            _finish_axes(ax, panel)
        _finish_steps(axes[-1], rows, xlabel)

    return _render(draw, plot.title)


def render_curves(title: str, xlabel: str, xs: Sequence[float], curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return curves of shares over `xs` on a log2 axis, with confidence bands, as an inline `<svg>` element. `curves` maps a label to one
    estimate {value, low, high} per element of `xs`."""

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        for (label, estimates), color, dash, marker in zip(curves.items(), _SERIES, _DASHES, _MARKERS, strict=False):
            shares, lows, highs = ([estimate[bound] for estimate in estimates] for bound in ("value", "low", "high"))
            ax.fill_between(xs, lows, highs, color=color, alpha=0.13, linewidth=0)
            ax.plot(xs, shares, color=color, linestyle=dash, marker=marker, markersize=4.5, label=label)
        ax.set_xscale("log", base=2)
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
        ax.set_xlabel(xlabel)
        _add_legend(ax)
        _finish_axes(ax, Panel("correct", kind="share"))

    return _render(draw, title)


def _render(draw: Callable[[Figure], None], title: str) -> str:
    """Draw a figure and return it as an inline `<svg>` with the page's colors and font, a label for screen readers, and no metadata."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = re.sub(r"font: (\S+) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = svg.replace('role="img"', f'role="img" aria-label="{escape(title)}"', 1)
    for placeholder, css in _CSS.items():
        svg = svg.replace(placeholder, css)
    return svg.replace("#000000", "var(--ink)")


def _draw_lines(ax: Axes, rows: Rows, panel: Panel) -> None:
    for number, (key, label) in enumerate(panel.series):
        points = [(float(row["step"] or 0), row[key]) for row in rows if key in row]
        steps, values = [step for step, _ in points], [math.nan if value is None else float(value) for _, value in points]
        # The ninth line reuses the first color with another dash.
        color, dash = number % len(_SERIES), (number + number // len(_SERIES)) % len(_DASHES)
        style: dict[str, Any] = {"color": _SERIES[color], "linestyle": _DASHES[dash], "label": label}
        if len(points) <= _MARKED:
            style |= {"marker": _MARKERS[dash], "markersize": 4.5, "markeredgecolor": _PAPER, "markeredgewidth": 0.4}
        ax.plot(steps, values, **style)
        if not_finite := [step for step, value in points if value is None]:
            style = {"color": _SERIES[color], "transform": ax.get_xaxis_transform(), "label": f"{label}: not finite"}
            ax.plot(not_finite, [0.03] * len(not_finite), "x", **style)
    finite = [value for key, _ in panel.series for value in finite_values(rows, key)]
    positive = [value for value in finite if value > 0]
    if panel.kind == "log" and positive:
        if min(finite) > 0:
            ax.set_yscale("log")
        else:  # 0 and negative values: linear below the smallest positive value
            ax.set_yscale("symlog", linthresh=min(positive))
    if panel.legend or len(ax.get_lines()) > 1:
        _add_legend(ax)


def _add_legend(ax: Axes) -> None:
    longest = max((len(label) for label in ax.get_legend_handles_labels()[1]), default=0)
    columns = max(1, min(4, int(410 / (43 + 4.8 * longest))))  # in points: figure width; line and gap; one letter
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, handlelength=2.4, columnspacing=1.4)


def _finish_axes(ax: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter

    ax.set_ylabel(panel.ylabel)
    if panel.kind == "share":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        highest = ax.get_ylim()[1]
        ax.set_ylim(0, 1.0 if highest > 0.5 else max(highest, 0.01))
    elif panel.kind == "log" and ax.get_yscale() != "linear":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}" if value else "0"))
        ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    elif panel.zero:
        ax.set_ylim(bottom=0)
    if panel.kind == "bytes":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))


def _finish_steps(ax: Axes, rows: Rows, xlabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(xlabel)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    steps = [float(row["step"] or 0) for row in rows]
    margin = max(0.5, 0.02 * (max(steps) - min(steps)))
    ax.set_xlim(min(steps) - margin, max(steps) + margin)


def _draw_reward(ax: Axes, rows: Rows, panel: Panel) -> None:
    """Draw the mean reward in a band of one standard deviation."""
    band = [(row["step"] or 0, mean, row.get("reward/std") or 0.0) for row in rows if (mean := row.get("reward/mean")) is not None]
    steps, low, high = [step for step, _, _ in band], [mean - std for _, mean, std in band], [mean + std for _, mean, std in band]
    ax.fill_between(steps, low, high, color=_SERIES[0], alpha=0.16, linewidth=0, label="± 1 standard deviation")
    _draw_lines(ax, rows, panel)
    _add_legend(ax)


def _draw_phases(ax: Axes, rows: Rows, panel: Panel) -> None:
    """Draw the seconds of each phase as stacked bars per step; "other" is the rest of the step."""
    edges: list[float] = []
    places: dict[int, int] = {}
    for step in sorted({int(row["step"] or 0) for row in rows}):
        edges += [step - 0.5] * (edges[-1:] != [step - 0.5])  # steps without a row share one bar of no height
        places[step] = len(edges) - 1
        edges.append(step + 0.5)
    bottom = [0.0] * (len(edges) - 1)
    for number, (name, phase) in enumerate((*panel.series, ("", "other"))):
        seconds = [0.0] * len(bottom)
        for row in rows:
            index = places[int(row["step"] or 0)]
            step_seconds = float(row.get("time/step") or 0.0)
            seconds[index] = float(row.get(name) or 0.0) if name else max(0.0, step_seconds - bottom[index])
        if any(seconds):
            top = [low + height for low, height in zip(bottom, seconds, strict=True)]
            color = _SERIES[number % len(_SERIES)]
            ax.stairs(top, edges, baseline=bottom, fill=True, facecolor=color, edgecolor=_PAPER, linewidth=0.4, label=phase)
            bottom = top
    _add_legend(ax)


SECTIONS: dict[str, tuple[Plot, ...]] = {
    "Learning": (
        Plot("Accuracy", (Panel("correct", "share"),),
             "Held-out accuracy should rise with training accuracy; a widening gap means that the policy memorizes its problems."),
        Plot("Held-out accuracy by level or set", (Panel("correct, by level or set", "share"),),
             "Easy levels should rise first. A level that stays at 0 % earns no reward, so nothing is learned from it."),
        Plot("Reward", (Panel("reward", draw=_draw_reward),),
             "The mean should rise. When the band closes, all completions score alike and there is little left to learn from."),
        Plot("Completion length", (Panel("length (tokens)", zero=True), Panel("thought", "share"), Panel("cut at the limit", "share")),
             "Lengths may grow. If the share of cut completions grows too, the length limit is too tight."),
    ),
    "Precision: trainer against engine": (
        Plot("Mismatch of log-probabilities", (Panel("|Δ log p| (nats)", "log"), Panel("KL (nats per token)", "log", legend=True)),
             "All lines should stay flat and low (logarithmic axes). A rise means that the engine samples from another policy."),
        Plot("Mismatch by position in the response", (Panel("|Δ log p| by position (nats)", "log"),),
             "Each line covers response positions from n to 2n. Lines that spread out show a mismatch that grows along the response."),
        Plot("Mismatch by cause", (Panel("|Δ log p| by cause (nats)", "log"),),
             "Each line except the total is one difference between the engine's and the trainer's computation; start with the highest."),
        Plot("Draws", (Panel("draws (standard deviations)", legend=True),),
             "Tests of the engine's random draws: beyond about 7, its tokens are not draws from the distribution that it reports."),
        Plot("Response of the quantized weights",
             (Panel("engine's weights moved / masters moved", "log", legend=True), Panel("values changed", "share")),
             "Should stay near 1. Far above 1, a small step of the masters changes the policy a lot; near 0, the policy does not move."),
        Plot("Age of the tokens", (Panel("age (policy versions)", zero=True),),
             "How far generation is ahead of training, at most placement.max_staleness. Older tokens need more correction."),
        Plot("Weight sync", (Panel("bytes moved", "bytes", zero=True), Panel("sync (seconds)", zero=True)),
             "Bytes should be the same at every sync, and the proof should cost little compared with the sync."),
    ),
    "Experts": (
        Plot("Load of the experts", (Panel("most / mean"), Panel("choices dropped", zero=True, legend=True)),
             "1 is an even load. A rise means that few experts do most of the work and the others learn little."),
        Plot("Entropy of the routers", (Panel("router entropy (nats per token)", zero=True),),
             "A slow decline is normal. Near 0, the choice of experts is fixed."),
        Plot("Routing: trainer against engine", (Panel("tokens sent elsewhere", "share", legend=True),),
             "Tokens that the trainer would send to other experts. Routing replay uses the engine's choice and lowers the mismatch."),
    ),
    "Policy update": (
        Plot("Clipped tokens by sign of the advantage", (Panel("tokens clipped", "share"), Panel("calibrated bounds")),
             "A few percent is normal. Many more on one side means that steps in that direction are too large."),
        Plot("Weights of mismatch correction", (Panel("mean weight"), Panel("touched", "share")),
             "Means should stay near 1, with few tokens capped or masked. Otherwise the engine has drifted from the trainer."),
        Plot("Entropy", (Panel("entropy (nats per token)", zero=True),),
             "A slow decline is normal. A fall to 0 means that the policy has stopped exploring."),
        Plot("Change of the policy", (Panel("|Δ log p| of the step's own update (nats)", "log"),),
             "How much a step changes its own tokens. Should be level from the first step, and well above the mismatch."),
        Plot("Distance to the teacher", (Panel("KL to the teacher (nats per token)", zero=True),),
             "Should fall. If it stays level, the policy does not follow, or samples text that the teacher has never seen."),
        Plot("Gradient norm", (Panel("norm before clipping", zero=True),),
             "Spikes were clipped. Look at what was sampled in these steps."),
        Plot("Losses", (Panel("policy loss"), Panel("KL term")),
             "The policy loss stays around 0 by design and says little. The KL term grows as the policy moves away from its reference."),
        Plot("Groups trained on again",
             (Panel("groups", zero=True), Panel("share of the tokens", "share"), Panel("age (steps)", zero=True)),
             "Replayed groups should not crowd out new ones. A growing share, or old groups, mean training on stale data."),
        Plot("Loss of multi-token prediction", (Panel("MTP loss (nats per token)", zero=True),),
             "Low if the layer follows the policy. Rises when the policy learns to write differently."),
    ),
    "Critic": (
        Plot("Values and returns", (Panel("values and returns"), Panel("explained variance of returns")),
             "Values should follow the returns. An explained variance below 0 means that the critic is worse than a constant."),
        Plot("Value loss", (Panel("value loss", zero=True), Panel("values clipped", "share")),
             "Should fall at first. Many clipped values mean that the critic moves faster than critic.cliprange_value allows."),
    ),
    "Speed": (
        Plot("Time by phase", (Panel(STEP_SECONDS, zero=True, draw=_draw_phases),),
             "Speed up the tallest color first. A step that stands out contains an evaluation or a stall."),
        Plot("Memory by phase", (Panel("trainer (MiB)", zero=True), Panel("engine, or device (MiB)", zero=True)),
             "On shared devices, each side should be small while the other works. A line that rises from step to step is a leak."),
        Plot("Generation speed", (Panel("tokens per second", zero=True),),
             "Should stay level for equal lengths. A decline means longer completions or an engine short of memory."),
    ),
}  # fmt: skip
