"""Formats `eval.json` for the terminal, the evaluation page, and the run's report."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.observability.run_folder import EVAL, read_file_of
from megatron_rl.reporting.formatting import format_value, visible

EstimateDict = dict[str, float | None]  # value, low, high; low and high are None without an interval
Column = tuple[str, str, str]  # a column of estimates: title, kind, k
SCHEMA = 1


def format_interval(estimate: EstimateDict) -> str:
    """Return a share with its interval: "57.4 % (51.0–63.6)"."""
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    return format_value(value, "share") + ("" if low is None or high is None else f" ({100 * low:.1f}–{100 * high:.1f})")


def format_points(estimate: EstimateDict) -> str:
    """Return a difference of shares in percentage points, with its interval: "+8.2 (+3.1…+13.3)"."""
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    return f"{100 * (value or 0):+.1f}" + ("" if low is None or high is None else f" ({100 * low:+.1f}…{100 * high:+.1f})")


def format_p_value(p: float) -> str:
    """Return a p-value as text: "0.034", "< 0.0001"."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def format_sampling(sampling: dict[str, Any]) -> str:
    """Return how completions were sampled, e.g. "4 completions per problem at temperature 0.6, top_p 0.95"."""
    count = f"{sampling['samples']} completion{'s' * (sampling['samples'] > 1)} per problem"
    if not sampling["temperature"]:
        return f"{count}, always the most probable token"
    bounds = [f", {name} {sampling[name]}" for name, off in (("top_p", 1), ("top_k", -1), ("min_p", 0)) if sampling[name] != off]
    return f"{count} at temperature {sampling['temperature']}{''.join(bounds)}"


def format_group(row: dict[str, Any]) -> str:
    if row["source"] is None:
        return "all"
    return row["source"] if row["level"] is None else f"{row['source']}, level {row['level']}"


def list_columns(results: dict[str, Any]) -> list[Column]:
    """Return the columns of estimates, without pass@1, maj@1, and maj@2, which equal mean@K (maj@2 if all completions vote)."""
    columns = [(f"mean@{results['sampling']['samples']}", "mean", "")]
    columns += [(f"pass@{k}", "pass", str(k)) for k in results["ks"] if k > 1]
    return columns + [(f"maj@{k}", "maj", str(k)) for k in results["ks"] if k > 2]


def list_widest_columns(results: dict[str, Any]) -> list[Column]:
    return list({kind: (title, kind, k) for title, kind, k in list_columns(results)}.values())


def format_estimates(row: dict[str, Any], columns: Sequence[Column], form: Callable[[EstimateDict], str] = format_interval) -> list[str]:
    return [form(row[kind][k] if k else row[kind]) for _, kind, k in columns]


def format_row(row: dict[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    return {
        "name": format_group(row),
        "problems": str(row["problems"]),
        "estimates": format_estimates(row, columns),
        "reward": format_value(row["reward"], "number"),
        "tokens": format_value(row["tokens"]["mean"], "number"),
        "truncated": format_value(row["truncated"], "share"),
        "errors": str(row["errors"]),
    }


def format_difference(row: dict[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    counts = {"better": row["better"], "worse": row["worse"], "equal": row["problems"] - row["better"] - row["worse"]}
    texts = {"name": format_group(row), "estimates": format_estimates(row, columns, format_points), "p": format_p_value(row["p"])}
    return texts | {name: str(count) for name, count in counts.items()}


def summarize(results: dict[str, Any]) -> str:
    overall = results["sides"]["checkpoint"]["table"][0]
    text = f"mean@{results['sampling']['samples']} is {format_value(overall['mean']['value'], 'share')} on {overall['problems']} problems"
    if results["comparison"]:
        comparison = results["comparison"][0]
        gap, p = comparison["mean"]["value"], format_p_value(comparison["p"])
        position = f"{abs(100 * gap):.1f} points {'above' if gap > 0 else 'below'}" if gap else "the same as"
        text += f", {position} the baseline's (p {p if p.startswith('<') else f'= {p}'})"
    return text + "."


def summarize_evaluations(run_dir: Path, left_out: list[str]) -> list[dict[str, str]]:
    """Return a table row for each complete evaluation in `run_dir/eval`, ordered by RL step. `left_out` receives a warning for each file
    that cannot be read."""
    evaluations = []
    for path in sorted(folder / "eval.json" for folder in run_dir.glob("eval/*")):
        if not os.path.lexists(path) or (results := read_file_of(EVAL, path, left_out)) is None:
            continue
        overall = results["sides"]["checkpoint"]["table"][0]
        # a k that a damaged file lacks is not shown
        columns = [column for column in list_columns(results) if not column[2] or column[2] in overall[column[1]]]
        estimates = zip(columns, format_estimates(overall, columns), strict=True)
        text = ", ".join(f"{title} {estimate}" for (title, _, _), estimate in estimates)
        baseline = results["sides"].get("baseline", {})
        against = f"; against {visible(baseline.get('path', 'a baseline'))}: {summarize(results)}" if results["comparison"] else ""
        step = results["sides"]["checkpoint"]["step"]
        row = {"folder": f"eval/{path.parent.name}", "step": str(step), "problems": str(overall["problems"]), "found": text + against}
        evaluations.append((step or 0, path.parent.name, row))
    return [row for _, _, row in sorted(evaluations, key=lambda entry: entry[:2])]
