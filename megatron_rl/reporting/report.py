"""The report: one HTML page that shows a run, made from its folder alone (run.json, metrics.jsonl, samples.jsonl, run.log).

The page holds everything it shows, loads nothing and runs no script, so it can be mailed or opened from a disk years later.
A run is called finished only where run.json says so; all text of the model is escaped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_rl.errors import UserError
from megatron_rl.observability.console import PHASES, MetricValue, proof_verdict
from megatron_rl.observability.run_log import read_jsonl, read_run
from megatron_rl.reporting import plots as report_plots
from megatron_rl.reporting.eval_text import summarize_evaluations
from megatron_rl.reporting.metric_glossary import (
    CAUSE_LABELS,
    HIDDEN_METRICS,
    describe_metric,
    format_bytes,
    format_duration,
    format_toml,
    format_value,
    visible,
)

MetricRow = dict[str, MetricValue]
_LOG_LINES = 20


@dataclass(frozen=True)
class SummaryTile:
    """One tile at the top of the page. `good` False marks it as a problem."""

    name: str
    value: str
    note: str
    good: bool = True


def write_report(run_dir: Path) -> Path:
    """Writes `run_dir/report.html` and returns its path. Raises UserError("RUN_DIR") where `run_dir` holds no readable run."""
    run = read_run(run_dir)
    rows, torn = read_jsonl(run_dir / "metrics.jsonl")
    samples, torn_samples = read_jsonl(run_dir / "samples.jsonl")
    _check_rows(rows, run_dir / "metrics.jsonl")
    page = render_page(
        "report.html.j2",
        run=run,
        name=run_dir.resolve().name,
        state=_state(run, rows),
        headline=headline(rows),
        facts=[_accuracy(rows), _proof(rows), _mismatch(rows), _speed(rows), _time(run, rows)],
        remarks=[remark for remark in (torn, torn_samples, *_not_finite(rows)) if remark],
        **_plots(rows),
        causes=_causes(rows),
        evaluations=summarize_evaluations(run_dir),
        table=_table(rows),
        samples=_sample_columns(samples),
        graph=_graph(run_dir / "graph.svg"),
        config=format_toml(run.get("config") or {}),
        log=_log_tail(run_dir / "run.log"),
    )
    try:
        return write_text(run_dir / "report.html", page)
    except OSError as error:
        raise UserError("RUN_DIR", str(run_dir), f"report.html cannot be written ({error.strerror})", "make the folder writable") from None


def _graph(drawing: Path) -> str:
    """The drawing of the precision graph that the run made; "" for a run that ended before it."""
    return drawing.read_text(encoding="utf-8", errors="replace") if drawing.is_file() else ""


def headline(rows: list[MetricRow]) -> str:
    """The run in one sentence, with its numbers."""
    scores = [(int(row["step"] or 0), score) for row in rows if (score := row.get("eval/accuracy")) is not None]
    if not rows:
        return "No step was recorded."
    if not scores:
        return f"No held-out accuracy was measured in {_steps(int(rows[-1]['step'] or 0))}."
    (first_step, first), (last_step, last) = scores[0], scores[-1]
    if last_step == first_step:
        return f"Held-out accuracy was {format_value(last, 'share')} at step {last_step}; there is no later evaluation."
    verb = "rose" if last > first else "fell" if last < first else "stayed"
    change = (
        f"at {format_value(last, 'share')}" if verb == "stayed" else f"from {format_value(first, 'share')} to {format_value(last, 'share')}"
    )
    return f"Held-out accuracy {verb} {change} over {_steps(last_step - first_step)}."


def _state(run: dict[str, Any], rows: list[MetricRow]) -> dict[str, str]:
    """How the run ended: `status` for the page's style, `word` for the mark, `prefix` of the headline, `sentence` for the reader."""
    planned, done = (run.get("config") or {}).get("train", {}).get("steps"), int(rows[-1]["step"] or 0) if rows else 0
    reached = f"step {done} of {planned}" if planned else f"step {done}"
    if run["status"] == "broken":
        sentence = f"The run broke after {reached}: {visible(run.get('reason') or 'no reason was recorded')}"
        return {"status": "broken", "word": "✗ broken", "prefix": f"Broken after {reached}. ", "sentence": sentence}
    if run["status"] == "running":
        heard = _last_time(rows)
        last = f"; its last row was written on {_when(heard)}" if heard else ""
        sentence = f"The run has not finished: it is at {reached}, still going on or ended without a word{last}."
        return {"status": "running", "word": "… not finished", "prefix": f"Not finished, {reached}. ", "sentence": sentence}
    if planned and done < planned:
        sentence = f"run.json says finished, but the last row is {reached}."
        return {"status": "running", "word": "! ended early", "prefix": f"Ended early, {reached}. ", "sentence": sentence}
    return {"status": "finished", "word": "✓ finished", "prefix": "", "sentence": f"The run finished at {reached}."}


def _last_time(rows: list[MetricRow]) -> float | None:
    """The second (Unix time) at which the last row was written."""
    return max((second for row in rows if (second := row.get("unix_time")) is not None), default=None)


def _accuracy(rows: list[MetricRow]) -> SummaryTile:
    scores = [score for row in rows if (score := row.get("eval/accuracy")) is not None]
    if not scores:
        return SummaryTile("Held-out accuracy", "–", "not measured")
    if len(scores) == 1:
        return SummaryTile("Held-out accuracy", format_value(scores[0], "share"), "one evaluation")
    first, last, best = (format_value(score, "share") for score in (scores[0], scores[-1], max(scores)))
    return SummaryTile("Held-out accuracy", last, f"{first} at first, best {best}")


def _proof(rows: list[MetricRow]) -> SummaryTile:
    """Whether every recorded sync was proved: as many equal hashes as tensors."""
    name, syncs = "Sync proof", [row for row in rows if row.get("sync/tensors") is not None]
    if not syncs:
        return SummaryTile(name, "–", "no sync was recorded")
    tensors = sum(row["sync/tensors"] or 0 for row in syncs)
    moved = format_bytes(sum(row.get("sync/bytes") or 0 for row in syncs))
    scope = f"{len(syncs)} sync{'s' * (len(syncs) != 1)}, {format_value(tensors, 'count')} tensors compared, {moved} moved"
    for row in syncs:
        verdict, good = proof_verdict(row)
        if not good:
            return SummaryTile(
                name, "✗ failed" if "sync/proved" in row else "✗ missing", f"step {row['step']}: {verdict}; {scope}", good=False
            )
    return SummaryTile(name, "✓ all equal", scope)


def _mismatch(rows: list[MetricRow]) -> SummaryTile:
    means = [value for row in rows if (value := row.get("mismatch/abs_mean")) is not None]
    largest = [value for row in rows if (value := row.get("mismatch/abs_max")) is not None]
    if not means:
        return SummaryTile("Mismatch |Δ log p|", "–", "not measured")
    top = f", largest of any token {format_value(max(largest), 'small')}" if largest else ""
    return SummaryTile("Mismatch |Δ log p|", format_value(means[-1], "small"), f"mean of the last step, in nats{top}")


def _speed(rows: list[MetricRow]) -> SummaryTile:
    speeds = [value for row in rows if (value := row.get("tokens/per_second")) is not None]
    if not speeds:
        return SummaryTile("Generation speed", "–", "not measured")
    total = sum(row.get("tokens/generated") or 0 for row in rows)
    note = f"median of the steps, {format_value(total, 'count')} tokens in all"
    return SummaryTile("Generation speed", f"{format_value(median(speeds), 'count')} tokens/s", note)


def _time(run: dict[str, Any], rows: list[MetricRow]) -> SummaryTile:
    started = datetime.fromisoformat(run["started"]) if run.get("started") else None
    end = datetime.fromisoformat(run["ended"]).timestamp() if run.get("ended") else _last_time(rows)
    if started is None or end is None:
        return SummaryTile("Time", "–", "no step was recorded")
    steps = [value for row in rows if (value := row.get("time/step")) is not None]
    each = f", {format_value(median(steps), 'seconds')} per step (median)" if steps else ""
    return SummaryTile("Time", format_duration(end - started.timestamp()), f"from {_when(started.timestamp())}{each}")


def _not_finite(rows: list[MetricRow]) -> list[str]:
    """One remark for each metric that was NaN or infinite at some step."""
    lost: dict[str, list[str]] = {}
    for row in rows:
        for key in (key for key, value in row.items() if value is None):
            lost.setdefault(key, []).append(str(row["step"]))
    return [f"{key} was not finite at step {', '.join(steps[:8])}{' and later' * (len(steps) > 8)}" for key, steps in lost.items()]


def _plots(rows: list[MetricRow]) -> dict[str, Any]:
    """`sections`: title -> [(plot, svg)]; `missing`: the titles of plots that the rows have nothing for."""
    drawable = [row | ({"sync/megabytes": size / 1e6} if (size := row.get("sync/bytes")) is not None else {}) for row in rows]
    drawn = {title: [(plot, report_plots.render_svg(plot, drawable)) for plot in plots] for title, plots in report_plots.SECTIONS.items()}
    shares = _phase_shares(rows)
    return {
        "sections": {title: shown for title, plots in drawn.items() if (shown := [pair for pair in plots if pair[1]])},
        "missing": [plot.title for plots in drawn.values() for plot, picture in plots if not picture],
        "phase_shares": shares,
    }


def _phase_shares(rows: list[MetricRow]) -> str:
    """Where the time went, in words: "generate 52 %, train 30 %"."""
    spent = {phase: sum(row.get(f"time/{phase}") or 0.0 for row in rows) for phase in PHASES}
    total = sum(spent.values())
    order = sorted((phase for phase in PHASES if total and spent[phase]), key=lambda phase: -spent[phase])
    return ", ".join(f"{phase} {100 * spent[phase] / total:.0f} %" for phase in order)


def _table(rows: list[MetricRow]) -> list[dict[str, str]]:
    """One line per metric: its last value, the step of it, its first value and its range."""
    lines = []
    for key in sorted({key for row in rows for key in row if key not in HIDDEN_METRICS}):
        words, form = describe_metric(key)
        points = [(row["step"], row[key]) for row in rows if key in row]
        finite = [value for _, value in points if value is not None]
        extremes = f"{format_value(min(finite), form)} … {format_value(max(finite), form)}" if finite else "–"
        first, (step, last) = points[0][1], points[-1]
        line = {
            "key": key,
            "meaning": words,
            "first": format_value(first, form),
            "last": format_value(last, form),
            "step": str(step),
            "range": extremes,
        }
        lines.append(line)
    return lines


def _causes(rows: list[MetricRow]) -> dict[str, Any]:
    """The last attribution of the mismatch: its step, and for each cause and the whole four numbers; {} where there is none."""
    measured = [row for row in rows if "mismatch/cause/total/mean" in row]
    if not measured:
        return {}
    row, columns = measured[-1], ("abs_mean", "abs_max", "mean", "k3")
    return {
        "step": row["step"],
        "lines": [
            (words, [format_value(row.get(f"mismatch/cause/{cause}/{what}"), "small") for what in columns])
            for cause, words in CAUSE_LABELS.items()
        ],
    }


def _sample_columns(samples: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """The samples of the first, the middle and the last step that has some, each ordered by level."""
    steps = sorted({int(row["step"]) for row in samples if isinstance(row.get("step"), (int, float))})
    chosen = sorted({steps[0], steps[(len(steps) - 1) // 2], steps[-1]}) if steps else []
    return [(step, sorted((row for row in samples if row.get("step") == step), key=lambda row: row.get("level") or 0)) for step in chosen]


def _check_rows(rows: list[MetricRow], path: Path) -> None:
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("step"), int) or any(not isinstance(value, (int, float, type(None))) for value in row.values()):
            rule = f"row {number} has no whole number as step, or a value that is no number"
            raise UserError("RUN_DIR", str(path), rule, "restore the file")


def _log_tail(path: Path) -> str:
    if not path.is_file():
        return ""
    return visible("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]))


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _when(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def render_page(template: str, **values: Any) -> str:
    """Fills a page's template. Everything is escaped but the plots, which hold no text of the run."""
    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(
        visible=lambda text: visible(str(text)),
        number=lambda value: format_value(value, "number") if isinstance(value, (int, float)) else "–",
        signed=lambda value: f"{value:+.2f}" if isinstance(value, (int, float)) else "–",
    )
    return pages.get_template(template).render(**values)


def write_text(path: Path, text: str) -> Path:
    """Replaces a file in one piece; returns its path."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path
