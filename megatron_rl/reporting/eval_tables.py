"""The tables of an evaluation on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_rl.reporting.eval_text import (
    find_estimate,
    format_interval,
    format_line_name,
    format_p_value,
    format_points,
    list_widest_columns,
    summarize,
)
from megatron_rl.reporting.metric_glossary import format_value

_Column = tuple[str, str, str]


def print_results(results: dict[str, Any]) -> None:
    """A table for each side and one for the comparison; of pass@k and maj@k the largest k only."""
    console = Console(highlight=False, markup=False, emoji=False)
    columns = list_widest_columns(results)
    for name, side in results["sides"].items():
        _print(console, f"{name}: {side['path']}", columns, side["table"])
    if results["comparison"]:
        shown = _table("checkpoint less baseline, in points", [*(title for title, _, _ in columns), "p", "up", "down"])
        for line in results["comparison"]:
            cells = [_two_lines(format_points(find_estimate(line, kind, k))) for _, kind, k in columns]
            shown.add_row(format_line_name(line), *cells, format_p_value(line["p"]), str(line["better"]), str(line["worse"]))
        console.print(shown)
    console.print(summarize(results), soft_wrap=True)


def _print(console: Console, title: str, columns: list[_Column], lines: list[dict[str, Any]]) -> None:
    shown = _table(title, ["count", *(heading for heading, _, _ in columns), "tokens", "cut"])
    for line in lines:
        cells = [_two_lines(format_interval(find_estimate(line, kind, k))) for _, kind, k in columns]
        tokens = format_value(line["tokens"]["mean"], "number")
        shown.add_row(format_line_name(line), str(line["problems"]), *cells, tokens, format_value(line["truncated"], "share"))
    console.print(shown)
    if errors := lines[0]["errors"]:
        console.print(f"{errors} completions had no verdict and count as wrong; see error in completions.jsonl", soft_wrap=True)


def _table(title: str, numbers: list[str]) -> Table:
    """A table with columns of numbers behind one of names, which alone may be broken: it fits into 80 columns."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("problems of")
    for heading in numbers:
        shown.add_column(heading, justify="right", no_wrap=True)
    return shown


def _two_lines(estimate: str) -> str:
    """The interval below its value."""
    return estimate.replace(" (", "\n(")
