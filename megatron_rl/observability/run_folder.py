"""Reads a run's folder back. The disk may hold anything, so every file goes through a type, here and nowhere else.

A part of a wrong type is left out, and what is shown says so. What makes a run unreadable is a UserError of one line.
"""

import fcntl
import os
import socket
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter
from typing_extensions import TypedDict

from megatron_rl.config.reading import READ_ERRORS, Count, describe_read_error, keep_valid, open_regular, parse_json, read_file
from megatron_rl.errors import UserError, escape, shorten
from megatron_rl.metrics import MetricValue, Unit

_FIX = "name the folder of one run, such as runs/quickstart/latest"
_WRITTEN = ("run.json", "metrics.jsonl", "samples.jsonl", "run.log")
"""Files of a run that a resumed run writes."""
_LARGEST = 1e100
_MOST_SHOWN = 4  # number of parts that a warning names


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("Input should be a valid string")
    return value


def _check_time(text: str) -> str:
    if not 1970 <= datetime.fromisoformat(text).year < 9999:
        raise ValueError("no time of a run")
    return text


Text = Annotated[str, PlainValidator(_check_text)]
"""Any text, also one with half a surrogate pair, which a completion may contain and pydantic refuses."""
Time = Annotated[str, AfterValidator(_check_time)]
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, strict=True)]
Label = Annotated[str, Field(max_length=200)]


class Declaration(TypedDict, total=False):
    """A metric's declaration (`megatron_rl.metrics.Metric`)."""

    name: Required[Annotated[str, Field(max_length=200, pattern=r"^[^{}]*(\{\})?[^{}]*$")]]
    meaning: Required[str]
    unit: Unit
    panels: list[Label]
    label: Label
    progress: str
    expected: Annotated[list[Number], Field(min_length=2, max_length=2)] | None
    causes: Annotated[list[str], Field(min_length=2, max_length=2)]


class Change(TypedDict, total=False):
    field: Required[Text]
    before: Any
    after: Any
    moves: Text


class Resumption(TypedDict, total=False):
    step: Required[Count]
    at: Text
    changes: list[Change]


class TrainSection(TypedDict, total=False):
    steps: Count


class ConfigFile(TypedDict, total=False):
    train: TrainSection
    log: dict[Text, Any]


class RunFile(TypedDict, total=False):
    """run.json."""

    status: Required[Literal["running", "finished", "broken"]]
    reason: Text
    started: Time | None
    ended: Time | None
    host: Text
    cwd: Text
    argv: list[Text]
    versions: dict[Text, Text]
    models: dict[Text, Text] | None
    contents: dict[Text, Text]
    config: ConfigFile
    resumed: list[Resumption]
    metrics: list[Declaration]


def _check_row(row: dict[str, float | None]) -> dict[str, float | None]:
    step = row.get("step")
    if step is None or not step.is_integer() or not 0 <= step < 1 << 40:
        raise ValueError("its step is not the number of a step")
    if not 0 <= (row.get("unix_time") or 0) < 1e11:
        raise ValueError("its time is not one of a run")
    return row


MetricsRow = Annotated[dict[Text, Number | None], AfterValidator(_check_row)]
"""A line of metrics.jsonl: numbers, and None for one that was not finite."""


class SampleRow(TypedDict, total=False):
    """A line of samples.jsonl, or of an evaluation's completions.jsonl."""

    step: Count
    level: Text | Number | None
    prompt: Text | None
    completion: Text | None
    response: Text | None
    thought: Text | None
    error: Text | None
    finish_reason: Text | None
    reward: Number | None
    advantage: Number | None
    parts: dict[Text, Number | None] | None
    dialogue: list[Text] | None


class ProfiledOperator(TypedDict):
    name: Text
    calls: Count
    device_ms: Number
    host_ms: Number


class ProfileFile(TypedDict):
    """A file of `profile/`."""

    step: Count
    rank: Count
    micro_batches: Count
    operators: list[ProfiledOperator]


class Estimate(TypedDict):
    """A share or a difference of shares, with its interval."""

    value: Number | None
    low: Number | None
    high: Number | None


Estimates = dict[str, Estimate]
EvalRow = TypedDict("EvalRow", {"problems": Count, "mean": Estimate, "pass": Estimates, "maj": Estimates})


class EvalSide(TypedDict):
    path: NotRequired[Text]
    step: Count | None
    table: Annotated[list[EvalRow], Field(min_length=1)]


class EvalDifference(TypedDict):
    mean: Estimate
    p: Number


def _check_sides(sides: dict[str, EvalSide]) -> dict[str, EvalSide]:
    if "checkpoint" not in sides:
        raise ValueError("there is no checkpoint")
    return sides


class EvalSampling(TypedDict):
    samples: Annotated[int, Field(ge=1, lt=1 << 31)]


class EvalFile(TypedDict):
    """What the report reads of an evaluation's eval.json."""

    sampling: EvalSampling
    ks: list[Count]
    sides: Annotated[dict[str, EvalSide], AfterValidator(_check_sides)]
    comparison: list[EvalDifference]


RUN, METRICS, SAMPLES, PROFILE, EVAL = (TypeAdapter[Any](kind) for kind in (RunFile, MetricsRow, SampleRow, ProfileFile, EvalFile))


def read_run(folder: Path, left_out: list[str] | None = None, field: str = "RUN_DIR") -> dict[str, Any]:
    """Return run.json of a run. Raise UserError, naming `field`, if `folder` is not a run folder or run.json is damaged.

    Args:
        left_out: if given, parts of wrong types are left out, and a warning is added to it. Otherwise they are an error.
    """
    if not os.path.isdir(folder):
        raise UserError(field, str(folder), "is not a folder", _FIX)
    try:
        value = parse_json(read_file(folder / "run.json"))
    except OSError as error:
        raise UserError(field, str(folder), f"holds no readable run.json ({error.strerror})", _FIX) from None
    except READ_ERRORS as error:
        raise UserError(field, str(folder), f"run.json is damaged: it {describe_read_error(error)}", _FIX) from None
    run, problems = keep_valid(RUN, value)
    if run is None or (problems and left_out is None):
        raise UserError(field, str(folder), f"run.json is damaged: {problems[0]}", _FIX)
    if problems and left_out is not None:
        left_out.append(f"run.json: {_list(problems)}")
    return dict(run)


def read_file_of(kind: TypeAdapter[Any], path: Path, left_out: list[str]) -> dict[str, Any] | None:
    """Return the JSON object of a file, or None with a warning in `left_out` if any part of it is of a wrong type."""
    try:
        value, problems = keep_valid(kind, parse_json(read_file(path)))
    except READ_ERRORS as error:
        value, problems = {}, [describe_read_error(error)]
    if problems:
        left_out.append(f"{path.parent.name}/{path.name} was left out: {shorten(escape(problems[0]))}")
    return None if problems else dict(value)


def read_metrics(folder: Path) -> list[dict[str, MetricValue]]:
    """Return the rows of metrics.jsonl, oldest first. What is left out is said on stderr."""
    rows, warning = read_jsonl(folder / "metrics.jsonl", METRICS)
    if warning:
        print(warning, file=sys.stderr)
    return rows


def read_jsonl(path: Path, kind: TypeAdapter[Any] = SAMPLES) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a JSONL file, and a warning about lines and parts that were left out, or "". Raise UserError("RUN_DIR") if the
    file cannot be read."""
    try:
        with open_regular(path) as file:
            lines = [(number, line) for number, line in enumerate(file.read().split(b"\n"), 1) if line.strip()]
    except FileNotFoundError:
        return [], ""
    except READ_ERRORS as error:
        raise UserError("RUN_DIR", str(path), describe_read_error(error), "check the file and its permissions") from None
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    torn = ""
    for number, line in lines:
        try:
            value = parse_json(line)
        except READ_ERRORS:
            if number == lines[-1][0]:
                torn = f"the last line (line {number}) is torn and was skipped"
            else:
                problems.append(f"line {number} (not JSON)")
            continue
        row, parts = keep_valid(kind, value)
        problems += [f"line {number}: {part}" for part in parts]
        rows += [row] if isinstance(row, dict) else []
    found = [text for text in (_list(problems) if problems else "", torn) if text]
    return rows, f"{path.name}: {'; '.join(found)}" if found else ""


def is_abandoned(folder: Path, run: Mapping[str, Any]) -> bool:
    """Return whether the process that should write a folder, and hold the lock of its run.log, has ended. Only its own host knows."""
    if run["status"] != "running" or run.get("host") != socket.gethostname():
        return False
    try:
        with open_regular(folder / "run.log") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def check_written_files(folder: Path) -> None:
    """Raise UserError if a file that a resumed run writes is something else, such as a pipe, which could hold the run for ever."""
    for path in (folder / name for name in _WRITTEN):
        if os.path.lexists(path) and not os.path.isfile(path):
            rule = f"its {path.name} is not a regular file"
            raise UserError("checkpoint.resume", str(folder), rule, "remove it, or start a new run with checkpoint.resume=never")


def _list(problems: list[str]) -> str:
    """Return "left out: ..." with the first problems and the number of others."""
    shown = [shorten(escape(problem)) for problem in problems[:_MOST_SHOWN]]
    more = len(problems) - len(shown)
    return f"left out: {', '.join(shown)}{f', and {more:,} more' * (more > 0)}"
