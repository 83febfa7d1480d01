"""Watchdog that stops a hung run after reporting the phase of each rank. Does not import torch.

    RUN_DIR/ranks/rank_00001.json   phase of rank 1 and the seconds in it; the file's age tells when rank 1 was last seen
    RUN_DIR/ranks/rank_00001.log    log of rank 1, with the stacks of its threads if the run hung (rank_log.py)
    RUN_DIR/ranks/stuck             created when a rank finds that the run hangs; finally contains the report

Each rank writes its file when it enters a phase, and a background thread writes it every few seconds. A single rank cannot tell whether it
is waiting legitimately: all ranks wait for rank 0 while the engine generates. So the run counts as hung if no rank has entered a phase for
`log.stuck_after` seconds. Then every responsive rank dumps the stacks of its threads, the first of them reports, and they exit with code 3.
torchrun or srun terminates the remaining ranks.
"""

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_rl.errors import RunError
from megatron_rl.observability.files import replace_file
from parallel.layout import format_numbers

_MAX_INTERVAL = 30.0  # maximum seconds between two writes of a rank's file
_FRESH = 0.2  # seconds in which a rank's file stays as it is if only other threads than the main thread enter phases
_REPORT_SECONDS = 60.0  # seconds that reporting a hang may take before the rank exits anyway


@dataclass(frozen=True)
class RankStatus:
    """Contents of a rank's file."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    seconds: float  # seconds in this phase when the file was written
    limit: float  # seconds after which something else ends the phase; they do not count as idle
    noted: bool = False  # whether the rank has dumped its stacks
    last_seen: float = 0.0  # time of the last write, in seconds by the file system's clock

    @property
    def location(self) -> str:
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    def idle_seconds(self, now: float) -> float:
        """Return the idle seconds without a new phase, at time `now` by the file system's clock."""
        return self.seconds + now - self.last_seen - self.limit


class HangWatchdog:
    """Watchdog of one rank. The run's threads call `enter_phase`; everything else happens in the watchdog's thread. Stacks are written to
    `log`. On the reporting rank, `notify` receives the report."""

    def __init__(self, folder: Path, rank: int, size: int, stuck_after: float, log: IO[str], notify: Callable[[str], None]) -> None:
        self._folder, self._rank, self._size, self._stuck_after = folder, rank, size, stuck_after
        self._log, self._notify = log, notify
        self._interval = min(stuck_after / 20, _MAX_INTERVAL)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._phase, self._step, self._limit, self._since, self._stacks_dumped = "start", 0, 0.0, time.monotonic(), False
        self._written = 0.0  # when the file was written
        self._write_status()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def enter_phase(self, phase: str, step: int | None, limit: float) -> None:
        """See the module's `enter_phase`."""
        with self._lock:
            self._limit, self._since = limit, time.monotonic()
            if threading.current_thread() is threading.main_thread():  # other threads only show that the run is alive
                self._phase, self._step = phase, self._step if step is None else step
            elif self._since - self._written < _FRESH:
                return
        self._write_status()

    def close(self) -> None:
        """Stop the watchdog, after a report that is in progress."""
        self._closed.set()
        self._thread.join(2 * _REPORT_SECONDS)

    def _run(self) -> None:
        last_check = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            suspended, last_check = now - last_check - 2 * self._interval, now
            if suspended > 0:  # the process was suspended, for example by SLURM
                with self._lock:
                    self._since += suspended
            self._write_status()
            if os.path.exists(self._folder / "stuck") or self._is_hung():  # Path.exists raises if the shared folder is gone
                self._abort()

    def _write_status(self) -> None:
        """Replace this rank's file. A failing disk does not stop the run."""
        with self._lock, suppress(OSError):
            self._written = time.monotonic()
            place = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid(), "phase": self._phase, "step": self._step}
            seconds = round(self._written - self._since, 3)
            status = {**place, "seconds": seconds, "limit": self._limit, "noted": self._stacks_dumped}
            replace_file(_status_file(self._folder, self._rank), json.dumps(status))

    def _is_hung(self) -> bool:
        if time.monotonic() - self._since - self._limit < self._stuck_after:
            return False
        now, statuses = self._read_statuses()
        return bool(statuses) and all(status.idle_seconds(now) >= self._stuck_after for status in statuses)

    def _read_statuses(self) -> tuple[float, list[RankStatus]]:
        """Return the file system's time and the statuses of all ranks, or (0, []) if this rank's own file is unreadable."""
        own = read_rank_status(self._folder, self._rank)
        statuses = [read_rank_status(self._folder, rank) for rank in range(self._size)]
        return (own.last_seen, [status for status in statuses if status]) if own else (0.0, [])

    def _abort(self) -> None:
        """Dump the stacks, report, and exit, whatever happens."""
        faulthandler.dump_traceback_later(_REPORT_SECONDS + 4 * self._interval, exit=True, file=self._log)
        try:
            (self._folder / "stuck").touch()  # makes all other ranks abort too
            self._dump_stacks()
            self._report()
        finally:
            os._exit(RunError.exit_code)

    def _dump_stacks(self) -> None:
        """Dump the stacks of this rank's threads, and wait until all responsive ranks have done so."""
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the run hangs; the threads of this rank:", file=self._log, flush=True)
        faulthandler.dump_traceback(self._log)
        self._stacks_dumped = True
        self._wait(self._all_stacks_dumped, 3 * self._interval)

    def _report(self) -> None:
        """Report the statuses of all ranks on the first responsive rank, and wait for the report on the others."""
        stuck = self._folder / "stuck"
        now, statuses = self._read_statuses()
        if self._rank != min(status.rank for status in statuses if not self._is_silent(status, now)):
            return self._wait(lambda: stuck.stat().st_size > 0, _REPORT_SECONDS)
        line = f"{describe_ranks(statuses, now, self._is_silent)}; no rank entered a phase for {self._stuck_after:g} s (log.stuck_after)"
        self._notify(f"the run hangs: {line}; stacks: {self._folder}/rank_*.log")
        stuck.write_text(f"{line}\n", encoding="utf-8")

    def _all_stacks_dumped(self) -> bool:
        now, statuses = self._read_statuses()
        return all(status.noted or self._is_silent(status, now) for status in statuses)

    def _is_silent(self, status: RankStatus, now: float) -> bool:
        return now - status.last_seen > 3 * self._interval

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait up to `seconds` for a condition while still writing this rank's file."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(self._interval / 4)
            self._write_status()


_watchdog: HangWatchdog | None = None


@contextmanager
def watch_for_hangs(run: Path, rank: int, size: int, stuck_after: float, log: IO[str], notify: Callable[[str], None]) -> Iterator[None]:
    """Context manager that watches rank `rank` of `size`; disabled if `stuck_after` is 0. See `HangWatchdog`."""
    global _watchdog
    if not stuck_after:
        yield
        return
    _watchdog = HangWatchdog(run / "ranks", rank, size, stuck_after, log, notify)
    try:
        yield
    finally:
        _watchdog.close()
        _watchdog = None


def clear_rank_files(run: Path) -> None:
    """Remove the ranks' files of a resumed run before any watchdog starts. Logs stay."""
    for file in [*(run / "ranks").glob("rank_*.json"), run / "ranks" / "stuck"]:
        file.unlink(missing_ok=True)


def enter_phase(phase: str, step: int | None = None, limit: float = 0.0) -> None:
    """Record that this rank enters a phase, which shows that the run is alive. Does nothing without a watchdog. `step` is the current RL
    step if it changes, and `limit` the seconds after which something else ends the phase, which do not count as idle."""
    if _watchdog is not None:
        _watchdog.enter_phase(phase, step, limit)


def read_rank_status(folder: Path, rank: int) -> RankStatus | None:
    """Return the newest status of a rank, or None if there is none."""
    try:
        with _status_file(folder, rank).open(encoding="utf-8") as file:  # opening the file first makes NFS refresh its attributes
            return RankStatus(**json.load(file), last_seen=os.fstat(file.fileno()).st_mtime)
    except (OSError, ValueError, TypeError):
        return None


def describe_ranks(statuses: Sequence[RankStatus], now: float, is_silent: Callable[[RankStatus, float], bool]) -> str:
    """Return one line about the ranks' locations: responsive ranks grouped by location, then each silent rank."""
    by_location: dict[str, list[RankStatus]] = {}
    for status in statuses:
        if not is_silent(status, now):
            by_location.setdefault(status.location, []).append(status)
    parts = [
        f"{format_numbers('rank', [status.rank for status in group], '-')}: in {location} "
        f"for {max(status.seconds + now - status.last_seen for status in group):.0f} s"
        for location, group in by_location.items()
    ]
    parts += [
        f"rank {status.rank}: in {status.location}, not heard for {now - status.last_seen:.0f} s "
        f"(process {status.pid} on {status.host}: suspended or dead)"
        for status in statuses
        if is_silent(status, now)
    ]
    return "; ".join(parts)


def _status_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"
