"""What the studies share: runs made one after the other or several at a time, in processes of their own, and one self-contained page of
their curves.

Each run has a folder of its own. A finished run with the same configuration is read instead of made anew, so a study that was stopped
goes on where it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from pathlib import Path
from threading import Lock
from typing import Any

import typer

from megatron_rl.config import Config, load_config
from megatron_rl.errors import UserError
from megatron_rl.observability.run_log import read_metrics, read_run
from megatron_rl.reporting.plots import Panel, Plot, Rows, render_svg

ROOT = Path(__file__).parents[2]
BROKEN = 3
"""Exit code of a run that broke; its folder keeps what it had."""
_MAKING_MODEL = Lock()
FigureSpec = Mapping[str, tuple[str, str, str]]
"""Metric -> title of its figure, label of the axis, `Panel.kind`."""
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
:root {{ --page: #f5f6f8; --card: #fff; --ink: #1c2430; --grid: #dde2e8;
  --s1: #0072b2; --s2: #d55e00; --s3: #009e73; --s4: #b3589a; --s5: #e69f00; --s6: #56b4e9; --s7: #b8a800; --s8: #8b95a1; }}
body {{ margin: 2rem auto; max-width: 1400px; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(600px, 1fr)); gap: 1rem; margin-top: 1rem; }}
figure, table {{ margin: 0; padding: 1rem; background: var(--card); border: 1px solid var(--grid); border-radius: 8px; }}
td, th {{ padding: .1rem .8rem; text-align: right; }} td:first-child, th:first-child {{ text-align: left; }}
</style><h1>{title}</h1><p>{intro}</p>{body}</html>
"""


@dataclass(frozen=True)
class StudyRun:
    """A run of a study. `draw` takes its metrics rows and exit code and returns the page's HTML, of this run and those before it."""

    label: str
    folder: Path
    overrides: Sequence[str]
    draw: Callable[[Rows, int], str]


def ensure_run(config: Path, folder: Path, overrides: Sequence[str], **process: Any) -> int:
    """Make the run unless it is there; return the exit code. Raise UserError for a bad configuration."""
    overrides = [f"--log.dir={folder}", *overrides]
    if _is_finished(folder, load_config(ROOT / config, overrides)):
        return 0
    return train(config, overrides, **process)


def train(config: Path, overrides: Sequence[str], launcher: Sequence[str] = (), **process: Any) -> int:
    """Make the model, unless it is there, and the run; return the exit code. `process`: more arguments of subprocess.run."""

    def run(*words: str) -> int:
        command = [sys.executable, *launcher, "-m", *words, str(config), *overrides]
        return subprocess.run(command, cwd=ROOT, check=False, **process).returncode

    with _MAKING_MODEL:  # runs at the same time may share it
        code = run("examples.arithmetic.warm_start")
    return code or run("megatron_rl", "train")


def run_study(
    target: Path, title: str, intro: str, runs: Sequence[StudyRun], config: Path, broken: Container[int] = (), jobs: int = 1
) -> None:
    """Make every run, `jobs` at a time with an equal share of the cores each, and write the page anew after each.

    Raises typer.Exit with a run's exit code, unless it is one of `broken`.
    """
    process: dict[str, Any] = {}
    if jobs > 1:
        threads = str(max((os.cpu_count() or 1) // jobs, 1))
        process = {"env": os.environ | {"OMP_NUM_THREADS": threads}, "stdout": subprocess.DEVNULL}
    with ThreadPoolExecutor(jobs) as pool:
        codes = pool.map(lambda run: ensure_run(config, run.folder, run.overrides, **process), runs)
        try:
            for run, code in zip(runs, codes, strict=True):
                if code and code not in broken:
                    raise typer.Exit(code)
                body = run.draw(read_metrics(run.folder / "latest"), code)
                target.write_text(_PAGE.format(title=escape(title), intro=escape(intro), body=body), encoding="utf-8")
                print(f"{run.label}: {run.folder / 'latest'}; the page is {target}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _is_finished(folder: Path, config: Config) -> bool:
    """Return whether the newest run below `folder` finished with this configuration."""
    try:
        run = read_run(folder / "latest")
    except UserError:
        return False
    return run["status"] == "finished" and run["config"] == config.model_dump(mode="json")


def draw_figures(runs: Mapping[str, Rows], shown: FigureSpec, xlabel: str = "step") -> str:
    """Draw one figure for each metric that some run has, with a line for each run, over the rows' "step"."""
    figures = []
    for metric, (title, ylabel, kind) in shown.items():
        lines = {name: (rows, metric) for name, rows in runs.items() if any(metric in row for row in rows)}
        panel = Panel(ylabel, kind, legend=True, series=tuple((name, name) for name in lines))
        svg = render_svg(Plot(title, (panel,)), merge_rows(lines), xlabel)
        figures += [f"<figure><h3>{escape(title)}</h3>{svg}</figure>"] if svg else []
    return f"<main>{''.join(figures)}</main>"


def merge_rows(lines: Mapping[str, tuple[Rows, str]]) -> Rows:
    """Return one row for each step with a value for each line that has one: name -> (a run's rows, the metric)."""
    points = {name: {int(row["step"] or 0): row[metric] for row in rows if metric in row} for name, (rows, metric) in lines.items()}
    steps = sorted({step for line in points.values() for step in line})
    return [{"step": step, **{name: line[step] for name, line in points.items() if step in line}} for step in steps]


def make_table(head: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    """Return an HTML table; every cell is escaped."""

    def line(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(cells, 'td') for cells in lines)}</table>"


def format_markdown(head: Sequence[object], lines: Iterable[Iterable[object]]) -> str:
    """Return the same table in Markdown."""
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (head, ["---"] * len(head), *lines))


def parse_names(text: str, known: Iterable[str], option: str) -> list[str]:
    """Return the names of a comma-separated option. Raise typer.BadParameter for one that is not known, and for none."""
    names, known = [name for name in text.split(",") if name], list(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"{', '.join(unknown) or 'nothing'}: choose from {', '.join(known)}", param_hint=option)
    return names
