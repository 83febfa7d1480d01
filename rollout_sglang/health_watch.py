"""Notices an engine that hangs: while it works it is asked something small now and then, and must answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.errors import RunError

_LONGEST_PAUSE = 5.0


class HealthMonitor:
    """`ping` raises RunError where the engine does not answer within `seconds`; `on_unresponsive` is called once it did not. An engine
    that is
    silent is noticed within twice that time.

    An engine may be watched by several threads at a time; one more thread asks.
    """

    def __init__(self, ping: Callable[[], object], on_unresponsive: Callable[[], None], seconds: float) -> None:
        self._ping, self._on_unresponsive, self._pause = ping, on_unresponsive, min(seconds, _LONGEST_PAUSE)
        self._lock = threading.Lock()
        self._watchers, self._suspended = 0, False
        self._stop_event = threading.Event()

    def begin_work(self) -> None:
        """From here on the engine is at work."""
        with self._lock:
            self._watchers += 1
            if self._watchers == 1 and not self._suspended:
                self._start()

    def end_work(self) -> None:
        """One work is done."""
        with self._lock:
            self._watchers -= 1
            if self._watchers == 0:
                self._stop_event.set()

    def suspend(self) -> None:
        """Until `resume` it is not asked, whoever works: its next answers may take long."""
        with self._lock:
            self._suspended = True
            self._stop_event.set()

    def resume(self) -> None:
        """Ends that."""
        with self._lock:
            if self._suspended and self._watchers:
                self._start()
            self._suspended = False

    def _start(self) -> None:
        self._stop_event = threading.Event()
        threading.Thread(target=self._run, args=(self._stop_event,), name="megatron-rl-watch", daemon=True).start()

    @contextmanager
    def working(self) -> Iterator[None]:
        self.begin_work()
        try:
            yield
        finally:
            self.end_work()

    def _run(self, over: threading.Event) -> None:
        while not over.wait(self._pause):
            try:
                self._ping()
            except RunError:
                if not over.is_set():
                    self._on_unresponsive()
                return
