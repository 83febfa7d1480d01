"""The run folder: what a run writes about itself. `run_folder` reads it back.

    run.json        command, config, versions, final status, and the declarations of its metrics
    metrics.jsonl   one JSON object per step; flat keys such as "reward/mean", numbers as values
    samples.jsonl   some completions of each step
    run.log         the lines shown on the console
    tensorboard/    the metrics for TensorBoard, unless log.trackers omits it
    checkpoints/    see docs/guides/checkpoints.md; a resumed run continues in the same folder
    ranks/          a log and the phase of each rank (`rank_log`, `hang_watchdog`)
    graph.json, graph.svg    the precision graphs of trainer and engine (megatron_rl.diagnosis.graph_check)

A crash can happen at any moment, so each metrics line is on disk before the next step starts, and a run counts as finished only if
`run.json` says so. A metric that was not measured is absent. A metric that is NaN or infinite is `null`, because JSON has no NaN. Secrets
are masked (`megatron_rl.redaction`).
"""

import fcntl
import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, Self

from megatron_rl.config.reading import READ_ERRORS, parse_json
from megatron_rl.errors import UserError
from megatron_rl.metrics import MetricValue, describe, dump_declarations, find_unexpected, warn_undeclared
from megatron_rl.observability.console import ProgressDisplay, progress_line
from megatron_rl.observability.files import make_unique_folder, replace_file
from megatron_rl.observability.run_folder import read_run
from megatron_rl.observability.streams import take_losses
from megatron_rl.observability.trackers import Trackers
from megatron_rl.redaction import redact, redact_data

_ROOM, _ROOM_BYTES = ".room", 1 << 20
"""File that holds space free for the end of a run: run.json, lines of run.log, and what TensorBoard has not written."""


class RunLog:
    """Writes one run folder until `finish`."""

    def __init__(self, folder: Path, run: dict[str, Any], resume_step: int | None = None) -> None:
        """Open the folder's files and start the trackers. `run` holds the contents of run.json, `resume_step` is the last step that
        trackers keep, or None for a new run.

        Raises:
            UserError: another process still writes the folder, or a tracker does not start.
            OSError: the folder cannot be written.
        """
        self.dir = folder
        self._run = run
        self._total_steps = int(run["config"].get("train", {}).get("steps", 0))
        self._files = {"run.log": _open_log(folder)}
        _keep_room(folder)
        self._files |= {name: (folder / name).open("a", encoding="utf-8") for name in ("metrics.jsonl", "samples.jsonl")}
        self._write_run()
        self._unexpected: Set[str] = set()  # metrics outside their expected range in the last row; each is reported once until it returns
        self._display = ProgressDisplay(self._total_steps)
        self._first_row: tuple[int, float] | None = None  # step and time of the first row of this launch
        self._trackers = Trackers(self.write_event)
        try:
            self._trackers.start(run["config"].get("log", {}).get("trackers", ()), folder, redact_data(run["config"]), resume_step)
        except UserError as error:
            self.finish("broken", str(error))
            raise

    @classmethod
    def create(cls, parent: Path, config: dict[str, Any], versions: dict[str, str], models: Mapping[str, str] | None = None) -> Self:
        """Create `parent/YYYY-mm-dd_HH-MM-SS` and point `parent/latest` at it. `config` is the whole config as plain data; `versions` maps
        package names to versions, and `models` the fields of models to hashes. Raises UserError("log.dir") if the folder cannot be
        created."""
        started = datetime.now().astimezone()
        try:
            folder = make_unique_folder(parent, started.strftime("%Y-%m-%d_%H-%M-%S"))
        except OSError as error:
            rule = f"cannot create the run's folder ({error.strerror})"
            raise UserError("log.dir", str(parent), rule, "name a folder you can write to") from None
        run = {
            "status": "running",
            "reason": "",
            "started": started.isoformat(timespec="seconds"),
            **_describe_launch(config, versions, models),
        }
        log = cls(folder, run)
        log.write_event(f"run folder: {folder}")
        try:
            _point_latest(parent, folder.name)
        except OSError as error:  # no symbolic links here, or a real folder has that name: continue without the link
            log.write_event(f"no link {parent / 'latest'}: {error.strerror}")
        return log

    @classmethod
    def reopen(
        cls,
        folder: Path,
        config: dict[str, Any],
        versions: dict[str, str],
        models: Mapping[str, str],
        step: int,
        last_row: int | None = None,
    ) -> Self:
        """Reopen the folder of a stopped run and discard what was recorded after `step`, and rows after `last_row`.

        `last_row` is `step - 1` if the run stopped before it wrote the row of the checkpoint's step. Raises UserError if another process
        still writes the folder, or if it cannot be written.
        """
        last_row = step if last_row is None else last_row
        run = read_run(folder, field="checkpoint.resume") | _describe_launch(config, versions, models)
        at = datetime.now().astimezone().isoformat(timespec="seconds")
        run["resumed"] = [*run.get("resumed", []), {"step": step, "at": at, "changes": []}]
        try:
            log = cls(folder, run, resume_step=last_row)
            _truncate_after(folder / "metrics.jsonl", last_row)
            _truncate_after(folder / "samples.jsonl", step)
        except OSError as error:
            raise UserError("checkpoint.resume", str(folder), f"cannot be written ({error.strerror})", "check its permissions") from None
        return log

    def write_event(self, text: str) -> None:
        """Print one line and write it to run.log with the time. Line breaks become " | "."""
        text = " | ".join(redact(text).splitlines())
        self._display.print_line(text)
        self._write_log(text)

    def record_launch(self, **facts: object) -> None:
        """Add facts about this launch to run.json."""
        self._run |= facts
        self._write_run()

    def record_changes(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Write what has changed in a resumed run to run.json and run.log. `changes`: those of `ResumedRun.describe_changes`."""
        resumed = self._run["resumed"][-1]
        resumed["changes"] += changes
        self._write_run()
        for change in changes:
            self.write_event(
                "from step {step} on, {field} is {after!r} instead of {before!r}. {moves}".format(step=resumed["step"] + 1, **change)
            )

    def record_contents(self, fingerprints: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Write the fingerprints of what fields name to run.json. Return those that differ from before: the value before and after."""
        known: Mapping[str, str] = self._run.get("contents", {})
        self.record_launch(contents=fingerprints)
        return {field: (known[field], now) for field, now in fingerprints.items() if known.get(field, now) != now}

    def set_phase(self, phase: str) -> None:
        """Show the current phase ("generate", "train", ...) on a terminal."""
        self._display.set_phase(phase)

    def write_step(self, metrics: Mapping[str, float]) -> None:
        """Record one step. `metrics` must contain "step"; "unix_time", the time of the write in seconds, is added."""
        warn_undeclared(metrics)
        row: dict[str, MetricValue] = {key: _json_number(key, value) for key, value in metrics.items()}
        row["unix_time"] = round(datetime.now().timestamp(), 3)
        self._append("metrics.jsonl", [row])
        step = int(metrics["step"])
        self._trackers.log({key: float(value) for key, value in metrics.items() if key != "step"}, step)
        now = time.monotonic()
        first_step, first_time = self._first_row = self._first_row or (step, now)
        left = (now - first_time) / max(step - first_step, 1) * (self._total_steps - step)
        line = progress_line(row, self._total_steps, left)
        self._display.print_line(line)
        self._display.set_step(step)
        self._write_log(line.plain)
        if not_finite := [key for key, value in row.items() if value is None]:
            self.write_event(f"step {step}: not finite: {', '.join(not_finite)}")
        unexpected = find_unexpected(row)
        for name in sorted(unexpected.keys() - self._unexpected):
            self.write_event(f"warning: step {step}: {unexpected[name]}")
        self._unexpected = unexpected.keys()

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record completions of a step, as `rollout.worker.build_sample_rows` makes them."""
        self._append("samples.jsonl", [{"step": step, **row} for row in rows])

    def finish(self, status: Literal["finished", "broken"], reason: str = "") -> None:
        """Write the final status to run.json and close all files. A run marked as broken stays broken."""
        if self._run["status"] == "broken" or self._run["status"] == status:
            return
        self._run.update(status=status, reason=reason, ended=datetime.now().astimezone().isoformat(timespec="seconds"))
        (self.dir / _ROOM).unlink(missing_ok=True)
        self._write_run()
        self._display.close()
        if not self._files["run.log"].closed:
            self.write_event(f"run {status}: {reason}" if reason else f"run {status}")
            self._trackers.finish(status)
        for file in self._files.values():
            with suppress(OSError):  # a full disk
                file.close()

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        file = self._files[name]
        clean = redact_data([_replace_non_finite(row) for row in rows])
        file.write("".join(json.dumps(row, allow_nan=False, default=_to_json_value) + "\n" for row in clean))
        file.flush()
        os.fsync(file.fileno())

    def _write_log(self, text: str) -> None:
        for line in (text, *take_losses()):
            self._files["run.log"].write(f"{datetime.now():%H:%M:%S}  {line}\n")
        with suppress(OSError):  # a full disk: the console has the line, and the next row ends the run
            self._files["run.log"].flush()

    def _write_run(self) -> None:
        run = redact_data(_replace_non_finite(self._run | {"metrics": dump_declarations()}))
        text = json.dumps(run, indent=2, default=_to_json_value, allow_nan=False)
        replace_file(self.dir / "run.json", text, durable=True)


def _describe_launch(config: dict[str, Any], versions: dict[str, str], models: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the entries of run.json that describe a start or a resumption by this process."""
    process = {"argv": sys.argv, "cwd": os.getcwd(), "host": socket.gethostname(), "pid": os.getpid()}
    return {"status": "running", "reason": "", "ended": None, **process, "versions": versions, "models": models or {}, "config": config}


def _open_log(folder: Path) -> IO[str]:
    """Open run.log, whose lock guards the folder until the file is closed or the process ends. Some file systems have no locks."""
    # A completion may contain half a surrogate pair, which UTF-8 cannot encode.
    file = (folder / "run.log").open("a", encoding="utf-8", errors="backslashreplace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError("checkpoint.resume", str(folder), "is still being written by another process", "wait for it, or end it") from None
    except OSError:
        pass
    return file


def _keep_room(folder: Path) -> None:
    """Keep space in which a run's end can be recorded if the disk is full by then. Some file systems cannot."""
    with (folder / _ROOM).open("wb") as file, suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)


def _truncate_after(path: Path, step: int) -> None:
    """Remove all lines after the last one of a step up to `step`, and a torn last line. Damaged lines beside those that stay, stay."""
    end = position = 0
    with path.open("rb+") as file:
        for line in file:
            position += len(line)
            found = _read_step(line)
            if line.endswith(b"\n") and (end == position - len(line) if found is None else found <= step):
                end = position
        file.truncate(end)
        os.fsync(file.fileno())


def _read_step(line: bytes) -> int | None:
    """Return the step of a line, or None for a damaged one."""
    try:
        row = parse_json(line)
    except READ_ERRORS:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else None


def _json_number(key: str, value: float) -> MetricValue:
    number = float(value)
    if not math.isfinite(number):
        return None
    metric = describe(key)
    return int(number) if key == "step" or (metric and metric.unit == "index") else number


def _replace_non_finite(value: Any) -> Any:
    """Return the data with None for every float that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_json_value(value: Any) -> Any:
    """Convert scalars of torch and numpy to numbers, and everything else, such as paths, to text."""
    return _replace_non_finite(value.item()) if hasattr(value, "item") else str(value)


def _point_latest(parent: Path, name: str) -> None:
    """Replace the link atomically, so that it always points at a run."""
    temporary = parent / f".latest-{name}"
    temporary.symlink_to(name)
    try:
        os.replace(temporary, parent / "latest")
    except OSError:
        temporary.unlink()
        raise
