"""Prints the tables of an evaluation on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_rl.reporting.eval_text import format_difference, format_row, format_sampling, list_widest_columns, summarize
from megatron_rl.reporting.formatting import format_value

_MANY_CUT = 0.1


def print_results(results: dict[str, Any]) -> None:
    """Print a table per side and one for the comparison, with the largest k of pass@k and maj@k."""
    console = Console(highlight=False, markup=False, emoji=False)
    columns = list_widest_columns(results)
    titles = [title for title, _, _ in columns]
    for name, side in results["sides"].items():
        table = _make_table(f"{name}: {side['path']}", ["count", *titles, "tokens", "cut"])
        for line in (format_row(row, columns) for row in side["table"]):
            table.add_row(line["name"], line["problems"], *_break_lines(line["estimates"]), line["tokens"], line["truncated"])
        console.print(table)
        if errors := side["table"][0]["errors"]:
            console.print(f"{errors} completions had no verdict and count as wrong; see `error` in completions.jsonl", soft_wrap=True)
        if (cut := side["table"][0]["truncated"]) > _MANY_CUT:
            console.print(f"{format_value(cut, 'share')} of the completions were cut: rollout.max_new_tokens is too low", soft_wrap=True)
    if results["comparison"]:
        table = _make_table("checkpoint - baseline, in points", [*titles, "p", "up", "down"])
        for line in (format_difference(row, columns) for row in results["comparison"]):
            table.add_row(line["name"], *_break_lines(line["estimates"]), line["p"], line["better"], line["worse"])
        console.print(table)
    console.print(f"{summarize(results)} {format_sampling(results['sampling'])}.", soft_wrap=True)


def _make_table(title: str, numbers: list[str]) -> Table:
    """Return a table with a column of names, which may wrap, and columns of numbers, so that it fits into 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("problems of")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _break_lines(estimates: list[str]) -> list[str]:
    """Put each interval below its value."""
    return [estimate.replace(" (", "\n(") for estimate in estimates]
