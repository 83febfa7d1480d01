"""A run that stands still says where each of its ranks stands, and ends. Needs no torch.

    RUN_DIR/ranks/rank_00001.json   the phase that rank 1 is in and since when; how old the file is tells when rank 1 was heard last
    RUN_DIR/ranks/rank_00001.log    what rank 1 logged, and its stacks where the run stood still (rank_log.py)
    RUN_DIR/ranks/stuck             there once a rank finds that the run stands still, and in the end holds the line about all ranks

A rank writes its file when it enters a phase, and a thread of it does so every few seconds. A rank alone cannot tell whether it waits
rightly: all ranks wait for rank 0 while the engine generates. So a run stands still when not one rank has entered a phase for
`log.stuck_after` seconds. Then every rank that still can writes down the stacks of its threads, the first of these speaks for all, and
they end with exit code 3. What is left of the run then, such as a rank that is held, is for torchrun or srun to end.
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

_MAX_INTERVAL = 30.0
"""Seconds between two signs of life, most."""
_REPORT_SECONDS = 60.0
"""Seconds that a rank may take to say what is to be said before it ends all the same."""


@dataclass(frozen=True)
class RankStatus:
    """Where a rank stands, as its file tells."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    seconds: float
    """In that phase, when the file was written."""
    limit: float
    """Seconds that the phase ends after by itself; they do not count."""
    noted: bool = False
    """Its stacks are in its log."""
    last_seen: float = 0.0
    """When the file was written, in seconds of the file system's clock."""

    @property
    def place(self) -> str:
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    def idle_seconds(self, now: float) -> float:
        """Seconds without a new phase that count, at `now` of the file system's clock."""
        return self.seconds + now - self.last_seen - self.limit


class HangWatchdog:
    """One rank's watch: the run's own threads call `enter_phase`, all else happens in a thread of the watch.

    `log` gets the stacks. `on_hang` is called on the one rank that speaks, with the line about all.
    """

    def __init__(self, folder: Path, rank: int, size: int, stuck_after: float, log: IO[str], on_hang: Callable[[str], None]) -> None:
        self._folder, self._rank, self._size, self._stuck_after = folder, rank, size, stuck_after
        self._log, self._on_hang = log, on_hang
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
            if threading.current_thread() is threading.main_thread():  # others work ahead: the run goes on, but is not where they are
                self._phase, self._step = phase, self._step if step is None else step
        self._write_status()

    def close(self) -> None:
        """Ends the watch; not while it says its last words."""
        self._closed.set()
        self._thread.join(2 * _REPORT_SECONDS)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            held, before = now - before - 2 * self._interval, now
            if held > 0:  # so was this process, or its machine: SLURM suspends whole jobs
                with self._lock:
                    self._since += held
            self._write_status()
            if (self._folder / "stuck").exists() or self._is_hung():
                self._abort()

    def _write_status(self) -> None:
        """Replaces this rank's file, in one piece. A disk that refuses costs the news, not the run."""
        with self._lock, suppress(OSError):
            seconds = round(time.monotonic() - self._since, 3)
            place = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid(), "phase": self._phase, "step": self._step}
            told = {**place, "seconds": seconds, "limit": self._limit, "noted": self._stacks_dumped}
            file = _file(self._folder, self._rank)
            hidden = file.with_name(f".{file.name}")
            hidden.write_text(json.dumps(told))
            os.replace(hidden, file)

    def _is_hung(self) -> bool:
        if time.monotonic() - self._since - self._limit < self._stuck_after:
            return False
        now, stands = self._read_statuses()
        return bool(stands) and all(stand.idle_seconds(now) >= self._stuck_after for stand in stands)

    def _read_statuses(self) -> tuple[float, list[RankStatus]]:
        """(the file system's time, what the ranks told last); (0, []) where this rank's own file cannot be read: time is unknown then."""
        own = read_rank_status(self._folder, self._rank)
        found = [read_rank_status(self._folder, rank) for rank in range(self._size)]
        return (own.last_seen, [stand for stand in found if stand]) if own else (0.0, [])

    def _abort(self) -> None:
        """The end of this process, whatever happens in here. The others look as often as this rank does, so they are waited for."""
        faulthandler.dump_traceback_later(_REPORT_SECONDS + 4 * self._interval, exit=True, file=self._log)
        try:
            stuck = self._folder / "stuck"
            stuck.touch()
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the run stands still; the threads of this rank:", file=self._log, flush=True)
            faulthandler.dump_traceback(self._log)
            self._stacks_dumped = True
            self._wait(self._all_stacks_dumped, 3 * self._interval)
            now, stands = self._read_statuses()
            if self._rank == min(stand.rank for stand in stands if not self._is_silent(stand, now)):
                line = (
                    f"{describe_ranks(stands, now, self._is_silent)}; no rank entered a phase for {self._stuck_after:g} s (log.stuck_after)"
                )
                self._on_hang(f"the run stands still: {line}; stacks: {self._folder}/rank_*.log")
                stuck.write_text(f"{line}\n")
            else:
                self._wait(lambda: stuck.stat().st_size > 0, _REPORT_SECONDS)
        finally:
            os._exit(RunError.exit_code)

    def _all_stacks_dumped(self) -> bool:
        now, stands = self._read_statuses()
        return all(stand.noted or self._is_silent(stand, now) for stand in stands)

    def _is_silent(self, stand: RankStatus, now: float) -> bool:
        return now - stand.last_seen > 3 * self._interval

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits for a condition, or for so long; this rank is heard meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(self._interval / 4)
            self._write_status()


_watch: HangWatchdog | None = None


@contextmanager
def watch_for_hangs(run: Path, rank: int, size: int, stuck_after: float, log: IO[str], on_hang: Callable[[str], None]) -> Iterator[None]:
    """The watch of rank `rank` of `size` over the run in that folder; none where `stuck_after` is 0. See `HangWatchdog`."""
    global _watch
    if not stuck_after:
        yield
        return
    _watch = HangWatchdog(run / "ranks", rank, size, stuck_after, log, on_hang)
    try:
        yield
    finally:
        _watch.close()
        _watch = None


def clear_rank_files(run: Path) -> None:
    """Forgets where the ranks of a run that goes on stood; before any of them watches. Their logs stay."""
    for old in [*(run / "ranks").glob("rank_*.json"), run / "ranks" / "stuck"]:
        old.unlink(missing_ok=True)


def enter_phase(phase: str, step: int | None = None, limit: float = 0.0) -> None:
    """This rank enters a phase: the run goes on. `step`: the RL step from now on; `limit`: seconds after which something else ends the
    phase, which count as no standstill. Without effect where nobody watches."""
    if _watch is not None:
        _watch.enter_phase(phase, step, limit)


def read_rank_status(folder: Path, rank: int) -> RankStatus | None:
    """What a rank told last; None where it told nothing yet."""
    try:
        with _file(folder, rank).open() as file:  # opened first: NFS then looks at the server
            return RankStatus(**json.load(file), last_seen=os.fstat(file.fileno()).st_mtime)
    except (OSError, ValueError, TypeError):
        return None


def describe_ranks(stands: Sequence[RankStatus], now: float, is_silent: Callable[[RankStatus, float], bool]) -> str:
    """Where the ranks stand, in one line; those that stand in one place together, those that are not heard by themselves."""
    places: dict[str, list[RankStatus]] = {}
    for stand in stands:
        if not is_silent(stand, now):
            places.setdefault(stand.place, []).append(stand)
    parts = [
        f"{_ranks([one.rank for one in here])}: in {place} for {max(one.seconds + now - one.last_seen for one in here):.0f} s"
        for place, here in places.items()
    ]
    parts += [
        f"rank {stand.rank}: in {stand.place}, not heard for {now - stand.last_seen:.0f} s "
        f"(process {stand.pid} on {stand.host}: held, or gone)"
        for stand in stands
        if is_silent(stand, now)
    ]
    return "; ".join(parts)


def _ranks(numbers: Sequence[int]) -> str:
    """ "ranks 0, 2-5" """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(names)}"


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"
