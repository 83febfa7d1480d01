"""Heartbeats of the ranks over the launch's store, which show that a rank is suspended or unreachable while other ranks wait for it.

Rank 0 listens to all ranks and tells them which rank it misses. The other ranks listen to rank 0. Nothing here touches a file, because the
shared folder may be what has gone away.
"""

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from megatron_rl.config.launch import read_launch
from megatron_rl.distributed.launch_store import open_launch_store
from megatron_rl.errors import RunError

_MAX_INTERVAL = 10.0  # maximum seconds between two heartbeats
_REPORT_SECONDS = 30.0  # seconds that reporting a lost rank may take before this rank exits anyway
_STORE_TIMEOUT = datetime.timedelta(minutes=10)
_LEFT, _LOST = b"left", "lost rank"


class Heartbeats:
    """Sends this rank's heartbeats in one thread. Another thread looks for silent ranks, calls `on_lost` with a line, and exits."""

    def __init__(self, store: dist.Store, rank: int, size: int, lost_after: float, on_lost: Callable[[str], None]) -> None:
        self._store, self._rank, self._lost_after, self._on_lost = store, rank, lost_after, on_lost
        self._interval = min(lost_after / 6, _MAX_INTERVAL)
        self._place = f"process {os.getpid()} on {socket.gethostname()}"
        self._heard = dict.fromkeys(range(1, size) if rank == 0 else [0], time.monotonic())
        self._beats = dict.fromkeys(self._heard, b"")
        self._told = ""  # rank 0's line about the rank that it misses
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=run, name="beat", daemon=True) for run in (self._exchange_forever, self._check_forever)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Tell the other ranks that this rank leaves."""
        self._closed.set()
        for thread in self._threads:
            thread.join(self._interval)
        if not self._threads[0].is_alive():
            with suppress(RuntimeError):
                self._store.set(f"beat {self._rank}", _LEFT.decode())

    def _exchange_forever(self) -> None:
        count = 0
        while not self._closed.is_set():
            count += 1
            with suppress(RuntimeError):  # a store that is gone is silence
                self._exchange(f"{count} {self._place}")
            self._closed.wait(self._interval)

    def _exchange(self, beat: str) -> None:
        """Send a heartbeat and read those of other ranks."""
        self._store.set(f"beat {self._rank}", beat)
        if self._rank and self._store.check([_LOST]):
            self._told = self._store.get(_LOST).decode(errors="replace")
        for rank, last in list(self._beats.items()):
            if (last or self._store.check([f"beat {rank}"])) and (new := self._store.get(f"beat {rank}")) != last:
                self._beats[rank], self._heard[rank] = new, time.monotonic()

    def _check_forever(self) -> None:
        checked = time.monotonic()
        while not self._closed.wait(self._interval / 2):
            now = time.monotonic()
            if now - checked > 2 * self._interval:  # this process was suspended, for example by SLURM with the whole job
                self._heard = dict.fromkeys(self._heard, now)
            checked = now
            if line := self._told or self._describe_silent(now):
                self._end(line)

    def _describe_silent(self, now: float) -> str:
        silent = [rank for rank, heard in self._heard.items() if now - heard > self._lost_after and self._beats[rank] != _LEFT]
        if not silent:
            return ""
        place = self._beats[silent[0]].decode(errors="replace").partition(" ")[2] or "never heard of"
        others = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        seconds = now - self._heard[silent[0]]
        return f"rank {silent[0]} ({place}){others} has been silent for {seconds:.0f} s (log.lost_after): suspended, or cut off"

    def _end(self, line: str) -> None:
        """Report and exit, whatever happens."""
        threading.Timer(_REPORT_SECONDS, os._exit, [RunError.exit_code]).start()
        try:
            if self._rank == 0:
                self._store.set(_LOST, line)
            self._on_lost(line)
        finally:
            os._exit(RunError.exit_code)


@contextmanager
def watch_for_lost_ranks(lost_after: float, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Context manager that exchanges heartbeats with the other ranks of the launch. If one is silent for `lost_after` seconds, it calls
    `on_lost` with one line, and the process exits with code 3. Does nothing if `lost_after` is 0 or there is one rank. Collective."""
    rank, size, *_ = read_launch()
    if not lost_after or size == 1:
        yield
        return
    heartbeats = Heartbeats(open_launch_store(_STORE_TIMEOUT).clone(), rank, size, lost_after, on_lost)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        heartbeats.close()
