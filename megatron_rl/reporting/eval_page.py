"""eval.html: one evaluation on one page, in the style of the run's report, made from its folder alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.observability.run_log import read_jsonl
from megatron_rl.reporting.eval_text import (
    find_estimate,
    format_interval,
    format_line_name,
    format_p_value,
    format_points,
    list_columns,
    list_widest_columns,
    summarize,
)
from megatron_rl.reporting.metric_glossary import format_duration, format_toml, format_value
from megatron_rl.reporting.plots import Curve, render_curves
from megatron_rl.reporting.report import SummaryTile, render_page, write_text

_SHOWN = 12
"""Completions on the page."""


def write_page(folder: Path) -> Path:
    """Writes `folder/eval.html` from its eval.json and completions.jsonl; returns its path."""
    results = json.loads((folder / "eval.json").read_text())
    rows, _ = read_jsonl(folder / "completions.jsonl")
    page = render_page(
        "eval.html.j2",
        results=results,
        headline=summarize(results),
        facts=_facts(results),
        titles=[title for title, _, _ in list_columns(results)],
        sides=[(name, side["path"], [_line(results, line) for line in side["table"]]) for name, side in results["sides"].items()],
        comparison=[_compared(results, line) for line in results["comparison"]],
        picture=_picture(results),
        samples=_spread([row for row in rows if row.get("side") == "checkpoint" and row.get("sample") == 0]),
        config=format_toml(results["config"]),
    )
    return write_text(folder / "eval.html", page)


def _facts(results: dict[str, Any]) -> list[SummaryTile]:
    side = results["sides"]["checkpoint"]
    overall, sampling = side["table"][0], results["sampling"]
    facts = []
    for title, kind, k in list_widest_columns(results):
        value, _, bounds = format_interval(find_estimate(overall, kind, k)).partition(" (")
        facts.append(SummaryTile(title, value, f"{100 * results['confidence']:.0f} % interval {bounds.removesuffix(')')}"))
    tokens = overall["tokens"]
    facts.append(
        SummaryTile("Length", f"{format_value(tokens['mean'], 'number')} tokens", f"median {tokens['median']:g}, longest {tokens['max']}")
    )
    limit = f"at {sampling['max_new_tokens']} tokens; {format_value(overall['unanswered'], 'share')} state no answer"
    facts.append(SummaryTile("Cut off", format_value(overall["truncated"], "share"), limit))
    errors = overall["errors"]
    facts.append(SummaryTile("Without verdict", f"{errors}", "completions; they count as wrong", good=not errors))
    facts.append(
        SummaryTile("Time", format_duration(side["seconds"]), f"{overall['problems']} problems, {sampling['samples']} completions each")
    )
    return facts


def _line(results: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": format_line_name(line),
        "problems": line["problems"],
        "estimates": [format_interval(find_estimate(line, kind, k)) for _, kind, k in list_columns(results)],
        "reward": format_value(line["reward"], "number"),
        "tokens": format_value(line["tokens"]["mean"], "number"),
        "truncated": format_value(line["truncated"], "share"),
        "errors": line["errors"],
    }


def _compared(results: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    estimates = [format_points(find_estimate(line, kind, k)) for _, kind, k in list_columns(results)]
    counts = {"better": line["better"], "worse": line["worse"], "equal": line["problems"] - line["better"] - line["worse"]}
    return {"name": format_line_name(line), "estimates": estimates, "p": format_p_value(line["p"]), **counts}


def _picture(results: dict[str, Any]) -> str:
    """pass@k and maj@k over k for all problems; "" where there is one k only."""
    ks = results["ks"]
    if len(ks) < 2:
        return ""
    lines = []
    for name, side in results["sides"].items():
        for kind in ("pass", "maj"):
            found = [side["table"][0][kind][str(k)] for k in ks]
            label = f"{kind}@k" + (f", {name}" if len(results["sides"]) > 1 else "")
            lines.append(Curve(label, ks, *([estimate[what] for estimate in found] for what in ("value", "low", "high"))))
    return render_curves("pass@k and maj@k", "k, completions that may be tried", lines)


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = min(_SHOWN, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]
