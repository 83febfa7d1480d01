"""The results of one evaluation: eval.html, a page in the style of the run's report, and tables on a terminal."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_rl.observability.files import replace_file
from megatron_rl.observability.run_folder import read_jsonl
from megatron_rl.redaction import redact
from megatron_rl.reporting.eval_text import (
    format_difference,
    format_estimates,
    format_row,
    format_sampling,
    list_columns,
    list_widest_columns,
    summarize,
)
from megatron_rl.reporting.formatting import format_duration, format_toml, format_value
from megatron_rl.reporting.plots import render_curves
from megatron_rl.reporting.report import SummaryTile, render_page

_MANY_CUT = 0.1  # share of cut completions from which the tables warn
_MAX_SAMPLES = 12  # number of completions on the page


def write_page(folder: Path) -> Path:
    """Write `folder/eval.html` from eval.json and completions.jsonl, and return its path."""
    results = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    rows, _ = read_jsonl(folder / "completions.jsonl")
    columns = list_columns(results)
    page = render_page(
        "eval.html.j2",
        results=results,
        headline=summarize(results),
        tiles=_make_tiles(results),
        sampled=format_sampling(results["sampling"]),
        titles=[title for title, _, _ in columns],
        sides=[(name, side["path"], [format_row(row, columns) for row in side["table"]]) for name, side in results["sides"].items()],
        comparison=[format_difference(row, columns) for row in results["comparison"]],
        picture=_draw_curves(results),
        samples=_spread([row for row in rows if row.get("side") == "checkpoint" and row.get("sample") == 0]),
        origin="How it was measured",
        versions=results["versions"],
        times=("started, ended", f"{results['started']}, {results['ended']}"),
        argv=results["argv"],
        config=format_toml(results["config"]),
    )
    return replace_file(folder / "eval.html", redact(page))


def _make_tiles(results: dict[str, Any]) -> list[SummaryTile]:
    side = results["sides"]["checkpoint"]
    overall, sampling = side["table"][0], results["sampling"]
    tiles = []
    columns = list_widest_columns(results)
    for (title, _, _), estimate in zip(columns, format_estimates(overall, columns), strict=True):
        value, _, bounds = estimate.partition(" (")
        tiles.append(SummaryTile(title, value, f"{100 * results['confidence']:.0f} % interval {bounds.removesuffix(')')}"))
    tokens, errors = overall["tokens"], overall["errors"]
    lengths = f"median {tokens['median']:g}, longest {tokens['max']}"
    limit = f"at {sampling['max_new_tokens']} tokens; {format_value(overall['unanswered'], 'share')} state no answer"
    work = f"{overall['problems']} problems, {sampling['samples']} completions each"
    return [
        *tiles,
        SummaryTile("Length", f"{format_value(tokens['mean'], 'number')} tokens", lengths),
        SummaryTile("Cut off", format_value(overall["truncated"], "share"), limit),
        SummaryTile("Without verdict", f"{errors}", "completions without a verdict count as wrong", good=not errors),
        SummaryTile("Time", format_duration(side["seconds"]), work),
    ]


def _draw_curves(results: dict[str, Any]) -> str:
    """Draw pass@k and maj@k over k for all problems; "" for a single k."""
    ks = results["ks"]
    if len(ks) < 2:
        return ""
    curves = {}
    for name, side in results["sides"].items():
        for kind in ("pass", "maj"):
            label = f"{kind}@k" + (f", {name}" if len(results["sides"]) > 1 else "")
            curves[label] = [side["table"][0][kind][str(k)] for k in ks]
    return render_curves("pass@k and maj@k", "k (completions per problem)", ks, curves)


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = min(_MAX_SAMPLES, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


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
    return [estimate.replace(" (", "\n(") for estimate in estimates]
