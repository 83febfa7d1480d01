"""Ends a run that hangs, after naming the phase that each of its ranks is in. Needs no torch.

    RUN_DIR/ranks/rank_00001.json   the phase of rank 1 and the seconds in it; the file's age tells when rank 1 was last seen
    RUN_DIR/ranks/rank_00001.log    what rank 1 logged, and the stacks of its threads if the run hung (rank_log.py)
    RUN_DIR/ranks/stuck             exists once a rank finds that the run hangs; in the end it holds the line about all ranks

A rank writes its file when it enters a phase, and a thread of it does so every few seconds. A rank alone cannot tell whether it waits
rightly: all ranks wait for rank 0 while the engine generates. So a run hangs when no rank at all has entered a phase for
`log.stuck_after` seconds. Then every rank that can dumps the stacks of its threads, the first of these reports for all, and they end with
exit code 3. What is left of the run then, such as a stopped rank, torchrun or srun ends.
"""

from __future__ import annotations

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

_MAX_INTERVAL = 30.0
"""Most seconds between two writes of a rank's file."""
_REPORT_SECONDS = 60.0
"""Seconds that the report of a hang may take before its rank ends all the same."""


@dataclass(frozen=True)
class RankStatus:
    """What the file of a rank says."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    seconds: float
    """In that phase, when the file was written."""
    limit: float
    """Seconds after which the phase ends by itself; they do not count."""
    noted: bool = False
    """Its stacks are in its log."""
    last_seen: float = 0.0
    """When the file was written, in seconds of the file system's clock."""

    @property
    def location(self) -> str:
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    def idle_seconds(self, now: float) -> float:
        """Return the seconds without a new phase that count, at `now` of the file system's clock."""
        return self.seconds + now - self.last_seen - self.limit


class HangWatchdog:
    """Watchdog of one rank: the run's own threads call `enter_phase`, all else happens in the watchdog's thread.

    The stacks go to `log`. On the one rank that reports, `notify` gets the line about all ranks.
    """

    def __init__(self, folder: Path, rank: int, size: int, stuck_after: float, log: IO[str], notify: Callable[[str], None]) -> None:
        self._folder, self._rank, self._size, self._stuck_after = folder, rank, size, stuck_after
        self._log, self._notify = log, notify
        self._interval = min(stuck_after / 20, _MAX_INTERVAL)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._phase, self._step, self._limit, self._since, self._stacks_dumped = "start", 0, 0.0, time.monotonic(), False
        self._write_status()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def enter_phase(self, phase: str, step: int | None, limit: float) -> None:
        """See the module's `enter_phase`."""
        with self._lock:
            self._limit, self._since = limit, time.monotonic()
            if threading.current_thread() is threading.main_thread():  # other threads show that the run goes on, not where it is
                self._phase, self._step = phase, self._step if step is None else step
        self._write_status()

    def close(self) -> None:
        """End the watchdog, but not while it reports a hang."""
        self._closed.set()
        self._thread.join(2 * _REPORT_SECONDS)

    def _run(self) -> None:
        last_check = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            suspended, last_check = now - last_check - 2 * self._interval, now
            if suspended > 0:  # this process, or its machine, did not run: SLURM suspends whole jobs
                with self._lock:
                    self._since += suspended
            self._write_status()
            if (self._folder / "stuck").exists() or self._is_hung():
                self._abort()

    def _write_status(self) -> None:
        """Replace this rank's file. A disk that refuses costs the status, not the run."""
        with self._lock, suppress(OSError):
            place = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid(), "phase": self._phase, "step": self._step}
            seconds = round(time.monotonic() - self._since, 3)
            status = {**place, "seconds": seconds, "limit": self._limit, "noted": self._stacks_dumped}
            replace_file(_status_file(self._folder, self._rank), json.dumps(status))

    def _is_hung(self) -> bool:
        if time.monotonic() - self._since - self._limit < self._stuck_after:
            return False
        now, statuses = self._read_statuses()
        return bool(statuses) and all(status.idle_seconds(now) >= self._stuck_after for status in statuses)

    def _read_statuses(self) -> tuple[float, list[RankStatus]]:
        """Return (the file system's time, statuses of all ranks that wrote one); (0, []) if this rank's own file, which tells the time,
        cannot be read."""
        own = read_rank_status(self._folder, self._rank)
        statuses = [read_rank_status(self._folder, rank) for rank in range(self._size)]
        return (own.last_seen, [status for status in statuses if status]) if own else (0.0, [])

    def _abort(self) -> None:
        """Dump the stacks, report, and end this process whatever happens in here."""
        faulthandler.dump_traceback_later(_REPORT_SECONDS + 4 * self._interval, exit=True, file=self._log)
        try:
            (self._folder / "stuck").touch()  # all other ranks abort as well
            self._dump_stacks()
            self._report()
        finally:
            os._exit(RunError.exit_code)

    def _dump_stacks(self) -> None:
        """Write the stacks of this rank's threads, and wait for those of all ranks that are not silent."""
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the run stands still; the threads of this rank:", file=self._log, flush=True)
        faulthandler.dump_traceback(self._log)
        self._stacks_dumped = True
        self._wait(self._all_stacks_dumped, 3 * self._interval)

    def _report(self) -> None:
        """Report the statuses of all ranks on the first rank that is not silent; wait for this report on the others."""
        stuck = self._folder / "stuck"
        now, statuses = self._read_statuses()
        if self._rank != min(status.rank for status in statuses if not self._is_silent(status, now)):
            return self._wait(lambda: stuck.stat().st_size > 0, _REPORT_SECONDS)
        line = f"{describe_ranks(statuses, now, self._is_silent)}; no rank entered a phase for {self._stuck_after:g} s (log.stuck_after)"
        self._notify(f"the run stands still: {line}; stacks: {self._folder}/rank_*.log")
        stuck.write_text(f"{line}\n")

    def _all_stacks_dumped(self) -> bool:
        now, statuses = self._read_statuses()
        return all(status.noted or self._is_silent(status, now) for status in statuses)

    def _is_silent(self, status: RankStatus, now: float) -> bool:
        return now - status.last_seen > 3 * self._interval

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition, at most for `seconds`; go on writing this rank's file meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(self._interval / 4)
            self._write_status()


_watchdog: HangWatchdog | None = None


@contextmanager
def watch_for_hangs(run: Path, rank: int, size: int, stuck_after: float, log: IO[str], notify: Callable[[str], None]) -> Iterator[None]:
    """Watch rank `rank` of `size` of the run in that folder; not if `stuck_after` is 0. See `HangWatchdog`."""
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
    """Remove the ranks' files of a run that is resumed, before any rank watches; their logs stay."""
    for file in [*(run / "ranks").glob("rank_*.json"), run / "ranks" / "stuck"]:
        file.unlink(missing_ok=True)


def enter_phase(phase: str, step: int | None = None, limit: float = 0.0) -> None:
    """Record that this rank enters a phase, so that the run does not hang; without effect while no watchdog runs.

    `step`: the RL step from now on. `limit`: seconds after which something else ends the phase; they do not count.
    """
    if _watchdog is not None:
        _watchdog.enter_phase(phase, step, limit)


def read_rank_status(folder: Path, rank: int) -> RankStatus | None:
    """Return the newest status of a rank; None if it has written none."""
    try:
        with _status_file(folder, rank).open() as file:  # opened before its time is read: NFS then asks the server
            return RankStatus(**json.load(file), last_seen=os.fstat(file.fileno()).st_mtime)
    except (OSError, ValueError, TypeError):
        return None


def describe_ranks(statuses: Sequence[RankStatus], now: float, is_silent: Callable[[RankStatus, float], bool]) -> str:
    """Return one line on where the ranks are: those in one location together, silent ones each by itself."""
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
        f"(process {status.pid} on {status.host}: held, or gone)"
        for status in statuses
        if is_silent(status, now)
    ]
    return "; ".join(parts)


def _status_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"
