"""How a part ended, and running one: a process group of its own, ended at its time limit; whatever happens to it stays with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpu_parts.parts import SECONDS, Part
from gpu_parts.rows import Row, read_rows

Status = Literal["passed", "failed", "timed out", "left out"]
_LOG_LINES = 30
GRACE = 3
"""Seconds that a part has to end, when it is told to and once more when it is made to."""


@dataclass(frozen=True)
class Outcome:
    """`why` explains every status but `passed`; `log` is the end of what a part printed that did not pass."""

    name: str
    title: str
    status: Status
    seconds: float = 0.0
    why: str = ""
    missing: Sequence[str] = ()
    """What it would use where it were there: names that `found.Machine.has` knows."""
    rows: Sequence[Row] = field(default_factory=list)
    log: str = ""


def run(part: Part, folder: Path, seconds: float, missing: Sequence[str], command: Sequence[str] = ()) -> Outcome:
    """Runs a part for at most `seconds`. It failed where a row is not as it must be, where it ended badly, or where it found nothing."""
    rows, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    command = [*(command or (sys.executable, "-m", f"gpu_parts.{part.name}")), "--rows", str(rows)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", SECONDS: f"{seconds:.0f}"}
    start = time.monotonic()
    with log.open("w") as output:
        code = _run(command, environment, output.fileno(), seconds)
    took, found = time.monotonic() - start, read_rows(rows)
    wrong = [row.what for row in found if row.ok is False]
    if code is None:
        status, why = "timed out", f"ended after {seconds:.0f} s; {len(found)} rows were found until then"
    elif wrong:
        status, why = "failed", f"{len(wrong)} of {len(found)} rows are not as they must be; first: {wrong[0]}"
    elif code or not found:
        status, why = "failed", f"its process ended with {code}" if code else "it found nothing"
    else:
        status, why = "passed", ""
    end = "" if status == "passed" else "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    return Outcome(part.name, part.title, status, took, why, missing, found, end)  # type: ignore[arg-type]


def _run(command: Sequence[str], environment: dict[str, str], output: int, seconds: float) -> int | None:
    """The exit code, None where it was ended."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also at Ctrl-C, and what an ended part left behind
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
