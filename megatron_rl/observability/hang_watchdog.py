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

_LONGEST_INTERVAL = 30.0
"""Seconds between two signs of life, most."""
_LAST_WORDS = 60.0
"""Seconds that a rank may take to say what is to be said before it ends all the same."""


@dataclass(frozen=True)
class Stand:
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
    heard: float = 0.0
    """When the file was written, in seconds of the file system's clock."""

    @property
    def place(self) -> str:
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    def idle(self, now: float) -> float:
        """Seconds without a new phase that count, at `now` of the file system's clock."""
        return self.seconds + now - self.heard - self.limit


class Watch:
    """One rank's watch: the run's own threads call `enter`, all else happens in a thread of the watch.

    `log` gets the stacks. `last_words` is called on the one rank that speaks, with the line about all.
    """

    def __init__(self, folder: Path, rank: int, size: int, stuck_after: float, log: IO[str], last_words: Callable[[str], None]) -> None:
        self._folder, self._rank, self._size, self._stuck_after = folder, rank, size, stuck_after
        self._log, self._last_words = log, last_words
        self._interval = min(stuck_after / 20, _LONGEST_INTERVAL)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._phase, self._step, self._limit, self._since, self._noted = "start", 0, 0.0, time.monotonic(), False
        self._tell()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def enter(self, phase: str, step: int | None, limit: float) -> None:
        """See the module's `enter`."""
        with self._lock:
            self._limit, self._since = limit, time.monotonic()
            if threading.current_thread() is threading.main_thread():  # others work ahead: the run goes on, but is not where they are
                self._phase, self._step = phase, self._step if step is None else step
        self._tell()

    def close(self) -> None:
        """Ends the watch; not while it says its last words."""
        self._closed.set()
        self._thread.join(2 * _LAST_WORDS)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            held, before = now - before - 2 * self._interval, now
            if held > 0:  # so was this process, or its machine: SLURM suspends whole jobs
                with self._lock:
                    self._since += held
            self._tell()
            if (self._folder / "stuck").exists() or self._stands_still():
                self._end()

    def _tell(self) -> None:
        """Replaces this rank's file, in one piece. A disk that refuses costs the news, not the run."""
        with self._lock, suppress(OSError):
            seconds = round(time.monotonic() - self._since, 3)
            place = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid(), "phase": self._phase, "step": self._step}
            told = {**place, "seconds": seconds, "limit": self._limit, "noted": self._noted}
            file = _file(self._folder, self._rank)
            hidden = file.with_name(f".{file.name}")
            hidden.write_text(json.dumps(told))
            os.replace(hidden, file)

    def _stands_still(self) -> bool:
        if time.monotonic() - self._since - self._limit < self._stuck_after:
            return False
        now, stands = self._look()
        return bool(stands) and all(stand.idle(now) >= self._stuck_after for stand in stands)

    def _look(self) -> tuple[float, list[Stand]]:
        """(the file system's time, what the ranks told last); (0, []) where this rank's own file cannot be read: time is unknown then."""
        own = read_stand(self._folder, self._rank)
        found = [read_stand(self._folder, rank) for rank in range(self._size)]
        return (own.heard, [stand for stand in found if stand]) if own else (0.0, [])

    def _end(self) -> None:
        """The end of this process, whatever happens in here. The others look as often as this rank does, so they are waited for."""
        faulthandler.dump_traceback_later(_LAST_WORDS + 4 * self._interval, exit=True, file=self._log)
        try:
            stuck = self._folder / "stuck"
            stuck.touch()
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the run stands still; the threads of this rank:", file=self._log, flush=True)
            faulthandler.dump_traceback(self._log)
            self._noted = True
            self._wait(self._all_noted, 3 * self._interval)
            now, stands = self._look()
            if self._rank == min(stand.rank for stand in stands if not self._is_silent(stand, now)):
                line = f"{describe(stands, now, self._is_silent)}; no rank entered a phase for {self._stuck_after:g} s (log.stuck_after)"
                self._last_words(f"the run stands still: {line}; stacks: {self._folder}/rank_*.log")
                stuck.write_text(f"{line}\n")
            else:
                self._wait(lambda: stuck.stat().st_size > 0, _LAST_WORDS)
        finally:
            os._exit(RunError.exit_code)

    def _all_noted(self) -> bool:
        now, stands = self._look()
        return all(stand.noted or self._is_silent(stand, now) for stand in stands)

    def _is_silent(self, stand: Stand, now: float) -> bool:
        return now - stand.heard > 3 * self._interval

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits for a condition, or for so long; this rank is heard meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(self._interval / 4)
            self._tell()


_watch: Watch | None = None


@contextmanager
def watched(run: Path, rank: int, size: int, stuck_after: float, log: IO[str], last_words: Callable[[str], None]) -> Iterator[None]:
    """The watch of rank `rank` of `size` over the run in that folder; none where `stuck_after` is 0. See `Watch`."""
    global _watch
    if not stuck_after:
        yield
        return
    _watch = Watch(run / "ranks", rank, size, stuck_after, log, last_words)
    try:
        yield
    finally:
        _watch.close()
        _watch = None


def clear(run: Path) -> None:
    """Forgets where the ranks of a run that goes on stood; before any of them watches. Their logs stay."""
    for old in [*(run / "ranks").glob("rank_*.json"), run / "ranks" / "stuck"]:
        old.unlink(missing_ok=True)


def enter(phase: str, step: int | None = None, limit: float = 0.0) -> None:
    """This rank enters a phase: the run goes on. `step`: the RL step from now on; `limit`: seconds after which something else ends the
    phase, which count as no standstill. Without effect where nobody watches."""
    if _watch is not None:
        _watch.enter(phase, step, limit)


def read_stand(folder: Path, rank: int) -> Stand | None:
    """What a rank told last; None where it told nothing yet."""
    try:
        with _file(folder, rank).open() as file:  # opened first: NFS then looks at the server
            return Stand(**json.load(file), heard=os.fstat(file.fileno()).st_mtime)
    except (OSError, ValueError, TypeError):
        return None


def describe(stands: Sequence[Stand], now: float, is_silent: Callable[[Stand, float], bool]) -> str:
    """Where the ranks stand, in one line; those that stand in one place together, those that are not heard by themselves."""
    places: dict[str, list[Stand]] = {}
    for stand in stands:
        if not is_silent(stand, now):
            places.setdefault(stand.place, []).append(stand)
    parts = [
        f"{_ranks([one.rank for one in here])}: in {place} for {max(one.seconds + now - one.heard for one in here):.0f} s"
        for place, here in places.items()
    ]
    parts += [
        f"rank {stand.rank}: in {stand.place}, not heard for {now - stand.heard:.0f} s (process {stand.pid} on {stand.host}: held, or gone)"
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
