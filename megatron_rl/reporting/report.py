"""The report: one self-contained HTML page about a run, made from the files in its folder.

The page loads nothing and runs no script, so it can be mailed or opened from a disk years later. A run is called finished only if run.json
says so. All text written by the model is escaped.
"""

import functools
import os
import re
from base64 import b64encode
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_rl.config.reading import READ_ERRORS, describe_read_error, open_regular, read_file
from megatron_rl.errors import UserError
from megatron_rl.metrics import ROW_KEYS, STEP_SECONDS, Declarations, Metric, describe, read_declarations
from megatron_rl.observability.console import proof_verdict
from megatron_rl.observability.files import replace_file
from megatron_rl.observability.hang_watchdog import read_rank_status
from megatron_rl.observability.run_folder import METRICS, PROFILE, is_abandoned, read_file_of, read_jsonl, read_run
from megatron_rl.redaction import redact
from megatron_rl.reporting.eval_text import summarize_evaluations
from megatron_rl.reporting.formatting import format_bytes, format_duration, format_toml, format_value, visible
from megatron_rl.reporting.plots import Rows, fill_sections, finite_values, render_svg

CAUSE_LABELS = {
    "kernels": "other kernels",
    "activations": "quantized activations",
    "weights": "quantized weights",
    "kv": "quantized keys and values",
    "version": "newer weights",
    "total": "engine to newest weights",
}
"""Labels of the causes of the mismatch; see `megatron_rl.diagnosis.attribution`."""
_LOG_LINES, _LOG_BYTES, _GRAPH_BYTES = 20, 1 << 16, 16 << 20
_UNDECLARED = "run.json has no metric declarations (an older version wrote it), so metrics are listed without descriptions and not plotted"


@dataclass(frozen=True)
class SummaryTile:
    """One tile at the top of the page. A tile that is not `good` is marked as a problem."""

    name: str
    value: str
    note: str
    good: bool = True


@dataclass(frozen=True)
class RunFacts:
    """What the pages show about a run. `run` holds the contents of run.json."""

    run: dict[str, Any]
    rows: list[dict[str, Any]]
    declared: Declarations
    state: dict[str, str]
    tiles: list[SummaryTile]
    warnings: list[str]


def read_facts(run_dir: Path) -> RunFacts:
    """Read run.json and metrics.jsonl. Raise UserError("RUN_DIR") if `run_dir` has no readable run."""
    left_out: list[str] = []
    run = read_run(run_dir, left_out)
    declared = read_declarations(run)
    rows, warning = read_jsonl(run_dir / "metrics.jsonl", METRICS)
    tiles = [_accuracy_tile(rows), _proof_tile(rows), _mismatch_tile(rows), _speed_tile(rows), _time_tile(run, rows)]
    warnings = [text for text in (*left_out, warning, "" if declared else _UNDECLARED, *_warn_not_finite(rows)) if text]
    return RunFacts(run, rows, declared, _state(run, rows, _describe_death(run_dir) if is_abandoned(run_dir, run) else ""), tiles, warnings)


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. Raises UserError("RUN_DIR") if `run_dir` has no readable run."""
    facts = read_facts(run_dir)
    run, rows, declared = facts.run, facts.rows, facts.declared
    samples, samples_warning = read_jsonl(run_dir / "samples.jsonl")
    graph, graph_warning = _read_graph(run_dir / "graph.svg")
    log, log_warning = _read_end(run_dir / "run.log")
    left_out: list[str] = []
    profiles, evaluations = _read_profiles(run_dir / "profile", left_out), summarize_evaluations(run_dir, left_out)
    page = render_page(
        "report.html.j2",
        name=run_dir.resolve().name,
        state=facts.state,
        headline=headline(rows),
        tiles=facts.tiles,
        warnings=[*facts.warnings, *filter(None, (samples_warning, *left_out, graph_warning, log_warning))],
        **_draw_plots(rows, declared),
        profiles=profiles,
        causes=_list_causes(rows),
        changes=[{"step": part["step"], **change} for part in run.get("resumed", ()) for change in part.get("changes", ())],
        evaluations=evaluations,
        metrics=_list_metrics(rows, declared),
        samples=_choose_samples(samples),
        graph=graph,
        log=visible("\n".join(log.splitlines()[-_LOG_LINES:])),
        origin="How it was run",
        versions=run.get("versions") or {},
        times=("started", f"{run.get('started')} on {run.get('host')}"),
        argv=run.get("argv") or [],
        config=format_toml(run.get("config") or {}),
    )
    try:
        return replace_file(run_dir / "report.html", redact(page))
    except OSError as error:
        raise UserError("RUN_DIR", str(run_dir), f"report.html cannot be written ({error.strerror})", "make the folder writable") from None


def headline(rows: Rows) -> str:
    """Return one sentence with the run's result."""
    scores = [(int(row["step"] or 0), score) for row in rows if (score := row.get("eval/accuracy")) is not None]
    if not rows:
        return "No step was recorded."
    if not scores:
        return f"No held-out accuracy was measured in {_count_steps(int(rows[-1]['step'] or 0))}."
    (first_step, first), (last_step, last) = scores[0], scores[-1]
    first_share, last_share = format_value(first, "share"), format_value(last, "share")
    if last_step == first_step:
        return f"Held-out accuracy was {last_share} at step {last_step}; there is no later evaluation."
    change = f"stayed at {last_share}" if last == first else f"{'rose' if last > first else 'fell'} from {first_share} to {last_share}"
    return f"Held-out accuracy {change} over {_count_steps(last_step - first_step)}."


def _state(run: dict[str, Any], rows: Rows, death: str) -> dict[str, str]:
    """Return how the run ended: `status` (the CSS class), `word` (the badge), `prefix` of the headline, and `sentence`."""
    planned, done = (run.get("config") or {}).get("train", {}).get("steps"), int(rows[-1]["step"] or 0) if rows else 0
    progress = f"step {done} of {planned}" if planned else f"step {done}"
    if run["status"] == "broken":
        sentence = f"The run broke after {progress}: {visible(run.get('reason') or 'no reason was recorded')}"
        return {"status": "broken", "word": "✗ broken", "prefix": f"Broken after {progress}. ", "sentence": sentence}
    if run["status"] == "running":
        last_time = _last_time(rows)
        last_row = f"; its last row was written on {_format_time(last_time)}" if last_time else ""
        if death:
            sentence = f"The run was killed after {progress}{death}{last_row}."
            return {"status": "broken", "word": "✗ killed", "prefix": f"Killed after {progress}. ", "sentence": sentence}
        sentence = f"The run has not finished: it is at {progress}, still running or killed on another host{last_row}."
        return {"status": "running", "word": "… not finished", "prefix": f"Not finished, {progress}. ", "sentence": sentence}
    if planned and done < planned:
        sentence = f"run.json says finished, but the last row is {progress}."
        return {"status": "running", "word": "! ended early", "prefix": f"Ended early, {progress}. ", "sentence": sentence}
    return {"status": "finished", "word": "✓ finished", "prefix": "", "sentence": f"The run finished at {progress}."}


def _describe_death(run_dir: Path) -> str:
    """Return what a run left that ended without a word: where rank 0 was, and the first rank's fatal error that its log has."""
    rank_0 = read_rank_status(run_dir / "ranks", 0)
    place = f", in {visible(rank_0.location)}" if rank_0 else ""
    for file in sorted((run_dir / "ranks").glob("rank_*.log")):
        log, _ = _read_end(file)
        if found := re.search(r"^Fatal Python error: (.{,80})", log.rpartition(": process ")[2], re.MULTILINE):  # of its last start
            return f"{place}: its process crashed ({visible(found[1])}; the stacks are in ranks/{file.name})"
    likely = "as after SIGKILL, which Linux sends to a process when memory runs out (the kernel's log, dmesg, tells)"
    return f"{place}: its process has ended without recording why, {likely}"


def _last_time(rows: Rows) -> float | None:
    return max(finite_values(rows, "unix_time"), default=None)


def _accuracy_tile(rows: Rows) -> SummaryTile:
    scores = finite_values(rows, "eval/accuracy")
    if not scores:
        return SummaryTile("Held-out accuracy", "–", "not measured")
    if len(scores) == 1:
        return SummaryTile("Held-out accuracy", format_value(scores[0], "share"), "one evaluation")
    first, last, best = (format_value(score, "share") for score in (scores[0], scores[-1], max(scores)))
    return SummaryTile("Held-out accuracy", last, f"{first} at first, best {best}")


def _proof_tile(rows: Rows) -> SummaryTile:
    """Return whether every recorded sync was proved, with as many equal hashes as tensors."""
    name, syncs = "Sync proof", [row for row in rows if row.get("sync/tensors") is not None]
    if not syncs:
        return SummaryTile(name, "–", "no sync was recorded")
    tensors = sum(row["sync/tensors"] or 0 for row in syncs)
    moved, proved = (sum(row.get(f"sync/{name}") or 0 for row in syncs) for name in ("bytes", "proved_bytes"))
    compared = f"{format_value(tensors, 'count')} tensors" + (f" ({format_bytes(proved)})" if proved else "")
    scope = f"{len(syncs)} sync{'s' * (len(syncs) != 1)}, {compared} compared, {format_bytes(moved)} moved"
    for row in syncs:
        verdict, good = proof_verdict(row)
        if not good:
            value = "✗ failed" if "sync/proved" in row else "✗ missing"
            return SummaryTile(name, value, f"step {row['step']}: {verdict}; {scope}", good=False)
    return SummaryTile(name, "✓ all equal", scope)


def _mismatch_tile(rows: Rows) -> SummaryTile:
    means, largest = finite_values(rows, "mismatch/abs_mean"), finite_values(rows, "mismatch/abs_max")
    if not means:
        return SummaryTile("Mismatch |Δ log p|", "–", "not measured")
    top = f", largest of any token {format_value(max(largest), 'small')}" if largest else ""
    return SummaryTile("Mismatch |Δ log p|", format_value(means[-1], "small"), f"mean of the last step, in nats{top}")


def _speed_tile(rows: Rows) -> SummaryTile:
    speeds = finite_values(rows, "tokens/per_second")
    if not speeds:
        return SummaryTile("Generation speed", "–", "not measured")
    total = sum(row.get("tokens/generated") or 0 for row in rows)
    note = f"median of the steps, {format_value(total, 'count')} tokens in all"
    return SummaryTile("Generation speed", f"{format_value(median(speeds), 'count')} tokens/s", note)


def _time_tile(run: dict[str, Any], rows: Rows) -> SummaryTile:
    started = datetime.fromisoformat(run["started"]) if run.get("started") else None
    end = datetime.fromisoformat(run["ended"]).timestamp() if run.get("ended") else _last_time(rows)
    if started is None or end is None:
        return SummaryTile("Time", "–", "no step was recorded")
    steps = finite_values(rows, "time/step")
    each = f", {format_value(median(steps), 'seconds')} per step (median)" if steps else ""
    return SummaryTile("Time", format_duration(end - started.timestamp()), f"from {_format_time(started.timestamp())}{each}")


def _warn_not_finite(rows: Rows) -> list[str]:
    """Return one warning for each metric that was NaN or infinite at some step."""
    steps_of: dict[str, list[str]] = {}
    for row in rows:
        for key in (key for key, value in row.items() if value is None):
            steps_of.setdefault(key, []).append(str(row["step"]))
    return [f"{key} was not finite at step {', '.join(steps[:8])}{' and later' * (len(steps) > 8)}" for key, steps in steps_of.items()]


def _draw_plots(rows: Rows, declared: Declarations) -> dict[str, Any]:
    """Return `sections` (title -> [(plot, svg)]), `missing` (titles of plots without data), and `phase_shares` ("generate 52 %, ...")."""
    pictures = {title: [(plot, render_svg(plot, rows)) for plot in plots] for title, plots in fill_sections(rows, declared).items()}
    panels = [panel for plots in pictures.values() for plot, _ in plots for panel in plot.panels if panel.ylabel == STEP_SECONDS]
    seconds = {label: sum(finite_values(rows, name)) for panel in panels for name, label in panel.series}
    shares = {label: 100 * spent / sum(seconds.values()) for label, spent in seconds.items() if spent}
    return {
        "sections": {title: drawn for title, plots in pictures.items() if (drawn := [pair for pair in plots if pair[1]])},
        "missing": [plot.title for plots in pictures.values() for plot, picture in plots if not picture],
        "phase_shares": ", ".join(f"{label} {shares[label]:.0f} %" for label in sorted(shares, key=lambda label: -shares[label])),
    }


def _list_metrics(rows: Rows, declared: Declarations) -> list[dict[str, str]]:
    """Return one table row per metric: first value, last value with its step, and range."""
    table = []
    for key in sorted({key for row in rows for key in row if key not in ROW_KEYS}):
        metric = describe(key, declared) or Metric(key, "")
        form, meaning = metric.unit, metric.meaning + f", in {metric.unit}" * (metric.unit in ("nats", "MiB"))
        points = [(row["step"], row[key]) for row in rows if key in row]
        finite = [value for _, value in points if value is not None]
        extremes = f"{format_value(min(finite), form)} … {format_value(max(finite), form)}" if finite else "–"
        first, (step, last) = points[0][1], points[-1]
        values = {"first": format_value(first, form), "last": format_value(last, form), "step": str(step), "range": extremes}
        table.append({"key": key, "meaning": meaning, **values})
    return table


def _read_profiles(folder: Path, left_out: list[str]) -> list[dict[str, Any]]:
    """Return the tables of `observability.profiling` for each profiled step and rank, formatted, with the file of the trace."""
    profiles = []
    for path in sorted(folder.glob("*.json")):
        if (found := read_file_of(PROFILE, path, left_out)) is not None:
            lines = [(row["name"], row["calls"], f"{row['device_ms']:.2f}", f"{row['host_ms']:.2f}") for row in found["operators"]]
            profiles.append({**found, "lines": lines, "trace": f"profile/{path.stem}.trace.json.gz"})
    return profiles


def _list_causes(rows: Rows) -> dict[str, Any]:
    """Return the last attribution of the mismatch: its step, and four numbers per cause and for the total; {} if there is none."""
    measured = [row for row in rows if "mismatch/cause/total/mean" in row]
    if not measured:
        return {}
    row, columns = measured[-1], ("abs_mean", "abs_max", "mean", "k3")
    return {
        "step": row["step"],
        "lines": [
            (label, [format_value(row.get(f"mismatch/cause/{cause}/{column}"), "small") for column in columns])
            for cause, label in CAUSE_LABELS.items()
        ],
    }


def _choose_samples(samples: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the samples of the first, the middle, and the last step with samples, ordered by level."""
    steps = sorted({row["step"] for row in samples if "step" in row})
    chosen = sorted({steps[0], steps[(len(steps) - 1) // 2], steps[-1]}) if steps else []
    return [(step, sorted((row for row in samples if row.get("step") == step), key=_order_by_level)) for step in chosen]


def _order_by_level(row: dict[str, Any]) -> tuple[bool, float, str]:
    level = row.get("level") or 0
    return (False, level, "") if isinstance(level, int | float) else (True, 0, level)


def _read_graph(path: Path) -> tuple[str, str]:
    """Return the precision graph as the URL of an image that holds it, and a warning. Either is empty. Whatever the file contains, as an
    image it runs no script, loads nothing, and leaves the page around it as it is."""
    try:
        text = read_file(path, _GRAPH_BYTES).decode()
        if "<!" in text:  # entities can grow without bound
            raise ValueError("it has a declaration")
        if ElementTree.fromstring(text).tag != "{http://www.w3.org/2000/svg}svg":
            raise ValueError("it is not an SVG file")
        return f"data:image/svg+xml;base64,{b64encode(redact(text).encode()).decode()}", ""
    except FileNotFoundError:
        return "", ""
    except ElementTree.ParseError as error:
        return "", f"{path.name} was left out: it is not an SVG file ({error})"
    except READ_ERRORS as error:
        return "", f"{path.name} was left out: {describe_read_error(error)}"


def _read_end(path: Path) -> tuple[str, str]:
    """Return the end of a log, and a warning. Either is empty."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode(errors="replace"), ""
    except FileNotFoundError:
        return "", ""
    except OSError as error:
        return "", f"{path.name} was left out: {describe_read_error(error)}"


def _count_steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _format_time(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def render_page(template: str, **values: Any) -> str:
    """Render a page's template. Everything is escaped except the plots and the graph, whose text is escaped already."""
    return _pages().get_template(template).render(**values)


@functools.cache
def _pages() -> Environment:
    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(
        visible=lambda text: visible(str(text)),
        number=lambda value: format_value(value, "number") if isinstance(value, (int, float)) else "–",
        signed=lambda value: f"{value:+.2f}" if isinstance(value, (int, float)) else "–",
    )
    return pages
