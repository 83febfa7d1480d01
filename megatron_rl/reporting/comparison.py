"""The comparison of several runs: one HTML page in the style of the report, made from the runs' folders."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.base import flatten
from megatron_rl.errors import UserError
from megatron_rl.metrics import STEP_SECONDS, Declarations, MetricValue
from megatron_rl.observability.files import replace_file
from megatron_rl.redaction import redact
from megatron_rl.reporting.plots import SECTIONS, Panel, Plot, render_svg
from megatron_rl.reporting.report import RunFacts, read_facts, render_page

_HELD_OUT = "eval/accuracy"
_MINUTES = "minutes since the run's first row"


def write_comparison(run_dirs: Sequence[Path], output: Path | None) -> Path:
    """Write the page that compares these runs and return its path: `output`, or comparison.html in their common parent folder. The first
    run is the baseline. Raises UserError("RUN_DIR") for a folder without a readable run, or a folder named twice."""
    folders = [folder.resolve() for folder in run_dirs]
    if twice := [str(folder) for number, folder in enumerate(folders) if folder in folders[:number]]:
        raise UserError("RUN_DIR", twice[0], "is named twice", "name each run once")
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    runs = {str(folder.relative_to(common)): read_facts(run_dir) for folder, run_dir in zip(folders, run_dirs, strict=True)}
    page = render_page(
        "comparison.html.j2",
        runs=runs,
        tiles=[(tiles[0].name, tiles) for tiles in zip(*(run.tiles for run in runs.values()), strict=True)],
        warnings=[f"{name}: {warning}" for name, run in runs.items() for warning in run.warnings],
        pictures=[(plot, picture) for plot, picture in _draw_plots(runs) if picture],
        settings=_find_differences({name: flatten(run.run.get("config") or {}) for name, run in runs.items()}),
        versions=_find_differences({name: run.run.get("versions") or {} for name, run in runs.items()}),
    )
    path = output or common / "comparison.html"
    try:
        return replace_file(path, redact(page))
    except OSError as error:
        raise UserError("--output", str(path), f"cannot be written ({error.strerror})", "name another file") from None


def _draw_plots(runs: Mapping[str, RunFacts]) -> list[tuple[Plot, str]]:
    """Return the report's plots with one line per run instead of one per metric, plus held-out accuracy over time."""
    rows = [{f"{number}:{key}": value for key, value in row.items()} | {"step": row["step"]} for number, row in _number_rows(runs)]
    plots = {metric: _compare(plot, panel, metric, runs) for plot, panel, metric in _choose_metrics(runs)}
    pictures = [(plot, render_svg(plot, rows)) for plot in plots.values()]
    return [*_draw_over_time([plot for metric, plot in plots.items() if metric == _HELD_OUT], runs), *pictures]


def _choose_metrics(runs: Mapping[str, RunFacts]) -> list[tuple[Plot, Panel, str]]:
    """Return one metric per panel of the report: the panel's first metric that a run has, held-out accuracy, or the seconds of a step."""
    known: Declarations = {name: metric for run in reversed(list(runs.values())) for name, metric in run.declared.items()}
    names = dict.fromkeys(key for run in runs.values() for row in sorted(run.rows, key=len, reverse=True) for key in row)
    panels = [(plot, panel) for plots in SECTIONS.values() for plot in plots for panel in plot.panels]
    chosen = []
    for plot, panel in panels:
        members = [name for name in names if name in known and panel.ylabel in known[name].panels]
        if panel.ylabel == STEP_SECONDS:
            members = ["time/step"]
        if members:
            chosen.append((plot, panel, _HELD_OUT if _HELD_OUT in members else members[0]))
    return chosen


def _compare(plot: Plot, panel: Panel, metric: str, runs: Mapping[str, RunFacts]) -> Plot:
    series = tuple((f"{number}:{metric}", name) for number, name in enumerate(runs))
    axes = Panel(panel.ylabel, panel.kind, zero=panel.zero, legend=True, series=series)
    return Plot(metric, (axes,), plot.caption)


def _draw_over_time(plots: Sequence[Plot], runs: Mapping[str, RunFacts]) -> list[tuple[Plot, str]]:
    """Return the plots over the minutes of each run, or nothing for rows of old versions, which have no times."""
    starts = [min((row["unix_time"] for row in run.rows if row.get("unix_time")), default=0.0) for run in runs.values()]
    rows: list[dict[str, MetricValue]] = [
        {f"{number}:{key}": value for key, value in row.items()} | {"step": (row["unix_time"] - starts[number]) / 60}
        for number, row in _number_rows(runs)
        if row.get("unix_time")
    ]
    timed = [Plot(f"{plot.title} over time", plot.panels, "The same result in less time is better.") for plot in plots]
    return [(plot, render_svg(plot, rows, _MINUTES)) for plot in timed] if rows else []


def _number_rows(runs: Mapping[str, RunFacts]) -> list[tuple[int, Any]]:
    return [(number, row) for number, run in enumerate(runs.values()) for row in run.rows]


def _find_differences(tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ between tables, with all values; "–" for a missing value."""
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    values = {key: [str(table.get(key, "–")) for table in tables.values()] for key in keys}
    return [(key, of_all) for key, of_all in values.items() if len(set(of_all)) > 1]
