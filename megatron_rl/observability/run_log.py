"""The run folder: what a run writes about itself, and how to read it back.

    run.json        what was started, with which configuration and versions, how it ended, and the declarations of its metrics
    metrics.jsonl   one JSON object per step; flat keys such as "reward/mean", numbers as values
    samples.jsonl   some completions of each step
    run.log         the lines that the console showed
    tensorboard/    the metrics again, for TensorBoard, unless log.trackers leaves it out
    checkpoints/    see docs/guides/checkpoints.md; a resumed run writes on in the same folder
    ranks/          a log and the phase of each rank (megatron_rl.observability.rank_log, megatron_rl.observability.hang_watchdog)
    graph.json, graph.svg    the precision graphs of trainer and engine (megatron_rl.training.graph_check)

A crash may come at any moment, so each metrics line is on the disk before the next step starts, and a run counts as finished only
when `run.json` says so. A metric that was not measured is absent; one that is NaN or infinite is `null`, for JSON has no NaN.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from megatron_rl.errors import UserError
from megatron_rl.metrics import MetricValue, describe, dump_declarations, find_unexpected, warn_undeclared
from megatron_rl.observability.console import ProgressDisplay, progress_line
from megatron_rl.observability.files import make_unique_folder, replace_file
from megatron_rl.observability.trackers import Trackers


class RunLog:
    """Writes one run folder, up to `finish`."""

    def __init__(self, folder: Path, run: dict[str, Any], resume_step: int | None = None) -> None:
        """`run`: run.json; `resume_step`: the last step that trackers are to keep. Raises UserError for a folder that another process still
        writes, or a tracker that does not start; OSError for a folder that cannot be written."""
        self.dir = folder
        self._run = run
        self._total_steps = int(run["config"].get("train", {}).get("steps", 0))
        self._files = {"run.log": _open_log(folder)}
        self._files |= {name: (folder / name).open("a") for name in ("metrics.jsonl", "samples.jsonl")}
        self._write_run()
        self._unexpected: Set[str] = set()  # metrics that the last row had outside their range: each is warned of once until it is back
        self._display = ProgressDisplay(self._total_steps)
        self._trackers = Trackers(self.write_event)
        try:
            self._trackers.start(run["config"].get("log", {}).get("trackers", ()), folder, run["config"], resume_step)
        except UserError as error:
            self.finish("broken", str(error))
            raise

    @classmethod
    def create(cls, parent: Path, config: dict[str, Any], versions: dict[str, str]) -> RunLog:
        """Make `parent/YYYY-mm-dd_HH-MM-SS` and point `parent/latest` at it.

        `config` is the whole configuration as plain data, `versions` maps a package to its version.
        Raises UserError("log.dir") if the folder cannot be made.
        """
        started = datetime.now().astimezone()
        try:
            folder = make_unique_folder(parent, started.strftime("%Y-%m-%d_%H-%M-%S"))
        except OSError as error:
            rule = f"cannot make the run's folder ({error.strerror})"
            raise UserError("log.dir", str(parent), rule, "name a folder you can write to") from None
        run = {"status": "running", "reason": "", "started": started.isoformat(timespec="seconds"), **_describe_launch(config, versions)}
        log = cls(folder, run)
        log.write_event(f"run folder: {folder}")
        try:
            _point_latest(parent, folder.name)
        except OSError as error:  # a file system without links, or a real folder of that name: the run goes on without it
            log.write_event(f"no link {parent / 'latest'}: {error.strerror}")
        return log

    @classmethod
    def reopen(cls, folder: Path, config: dict[str, Any], versions: dict[str, str], step: int, last_row: int | None = None) -> RunLog:
        """Go on in the folder of a run that stopped, as if nothing had been recorded after `step`, and no row after `last_row`: a run may
        be stopped while it writes the row of the step that it saves, which is then written again.

        Raises UserError("checkpoint.resume") if another process still writes it, or it cannot be written.
        """
        last_row = step if last_row is None else last_row
        run = read_run(folder) | _describe_launch(config, versions)
        run["resumed"] = [*run.get("resumed", []), {"step": step, "at": datetime.now().astimezone().isoformat(timespec="seconds")}]
        try:
            log = cls(folder, run, resume_step=last_row)
            _truncate_after(folder / "metrics.jsonl", last_row)
            _truncate_after(folder / "samples.jsonl", step)
        except OSError as error:
            raise UserError("checkpoint.resume", str(folder), f"cannot be written ({error.strerror})", "check its permissions") from None
        return log

    def write_event(self, text: str) -> None:
        """Print one line and write it, with the time, to run.log. Line breaks become " | "."""
        text = " | ".join(text.splitlines())
        self._display.print_line(text)
        self._write_log(text)

    def set_phase(self, phase: str) -> None:
        """Show on a terminal what the run is doing ("generate", "train", ...); written nowhere."""
        self._display.set_phase(phase)

    def write_step(self, metrics: Mapping[str, float]) -> None:
        """Record one step. `metrics` must hold "step"; the row also gets "unix_time", the second it was written."""
        warn_undeclared(metrics)
        row: dict[str, MetricValue] = {key: _json_number(key, value) for key, value in metrics.items()}
        row["unix_time"] = round(datetime.now().timestamp(), 3)
        self._append("metrics.jsonl", [row])
        step = int(metrics["step"])
        self._trackers.log({key: float(value) for key, value in metrics.items() if key != "step"}, step)
        line = progress_line(row, self._total_steps)
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
        """Record completions of a step: problem (its id), versions (of the oldest and newest token), level, prompt, completion, answer,
        reward, correct, advantage, finish_reason, error, mismatch (`training.mismatch.bin_mismatch`)."""
        self._append("samples.jsonl", [{"step": step, **row} for row in rows])

    def finish(self, status: Literal["finished", "broken"], reason: str = "") -> None:
        """End the run in run.json and close all files. A broken run stays broken: a later "finished" changes nothing."""
        if self._run["status"] == "broken" or self._run["status"] == status:
            return
        self._run.update(status=status, reason=reason, ended=datetime.now().astimezone().isoformat(timespec="seconds"))
        self._write_run()
        self._display.close()
        if not self._files["run.log"].closed:
            self.write_event(f"run {status}: {reason}" if reason else f"run {status}")
            self._trackers.finish(status)
        for file in self._files.values():
            file.close()

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        file = self._files[name]
        file.write("".join(json.dumps(_replace_non_finite(row), allow_nan=False, default=_to_json_value) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())

    def _write_log(self, text: str) -> None:
        self._files["run.log"].write(f"{datetime.now():%H:%M:%S}  {text}\n")
        self._files["run.log"].flush()

    def _write_run(self) -> None:
        run = _replace_non_finite(self._run | {"metrics": dump_declarations()})
        text = json.dumps(run, indent=2, default=_to_json_value, allow_nan=False)
        replace_file(self.dir / "run.json", text, durable=True)


def read_run(folder: Path) -> dict[str, Any]:
    """Return run.json of a run. Raises UserError("RUN_DIR") if `folder` is no run folder or run.json is damaged."""
    fix = "name the folder of one run, such as runs/quickstart/latest"
    if not folder.is_dir():
        raise UserError("RUN_DIR", str(folder), "is no folder", fix)
    try:
        run = json.loads((folder / "run.json").read_bytes())
    except OSError as error:
        raise UserError("RUN_DIR", str(folder), f"holds no readable run.json ({error.strerror})", fix) from None
    except ValueError as error:
        raise UserError("RUN_DIR", str(folder), f"run.json is damaged ({error})", fix) from None
    if not isinstance(run, dict) or run.get("status") not in ("running", "finished", "broken"):
        raise UserError("RUN_DIR", str(folder), "run.json has no status running, finished or broken", fix)
    return run


def read_metrics(folder: Path) -> list[dict[str, MetricValue]]:
    """Return the rows of metrics.jsonl, oldest first; [] before the first step. A torn last line is left out, with a warning on stderr."""
    rows, warning = read_jsonl(folder / "metrics.jsonl")
    if warning:
        print(warning, file=sys.stderr)
    return rows


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a JSONL file, and a warning ("" for none) if its last line was torn by a crash and left out.

    Raises UserError("RUN_DIR") with file and line for damage anywhere else.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        raise UserError("RUN_DIR", str(path), f"cannot be read ({error.strerror})", "check its permissions") from None
    rows: list[dict[str, Any]] = []
    numbered_lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in numbered_lines:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no JSON object")
        except ValueError:
            if number == numbered_lines[-1][0]:
                return rows, f"{path.name}: the last line (line {number}) is torn and was left out"
            raise UserError("RUN_DIR", str(path), f"line {number} is no JSON object", "restore the file or remove the line") from None
        rows.append(row)
    return rows, ""


def _describe_launch(config: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """Return what run.json says of a run that this process starts or resumes."""
    process = {"argv": sys.argv, "host": socket.gethostname(), "pid": os.getpid()}
    return {"status": "running", "reason": "", "ended": None, **process, "versions": versions, "config": config}


def _open_log(folder: Path) -> IO[str]:
    """Return run.log, which locks the folder until it is closed or this process ends in any way; some file systems have no locks."""
    # A completion may hold half a surrogate pair, which UTF-8 refuses; a log line is no reason to stop a run.
    file = (folder / "run.log").open("a", encoding="utf-8", errors="backslashreplace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError("checkpoint.resume", str(folder), "is still being written by another process", "wait for it, or end it") from None
    except OSError:
        pass
    return file


def _truncate_after(path: Path, step: int) -> None:
    """Cut off every line from the first one of a later step on, and a torn last line."""
    end = 0
    with path.open("rb+") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except ValueError:
                break
            end += len(line)
        file.truncate(end)
        os.fsync(file.fileno())


def _json_number(key: str, value: float) -> MetricValue:
    number = float(value)
    if not math.isfinite(number):
        return None
    metric = describe(key)
    return int(number) if key == "step" or (metric and metric.unit == "index") else number


def _replace_non_finite(value: Any) -> Any:
    """Return the same data with None for every float that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_json_value(value: Any) -> Any:
    """Convert what json cannot write itself: scalars of torch and numpy to numbers, all else (paths) to text."""
    return _replace_non_finite(value.item()) if hasattr(value, "item") else str(value)


def _point_latest(parent: Path, name: str) -> None:
    """Replace the link in one move, so that it always points at some run."""
    temporary = parent / f".latest-{name}"
    temporary.symlink_to(name)
    try:
        os.replace(temporary, parent / "latest")
    except OSError:
        temporary.unlink()
        raise
