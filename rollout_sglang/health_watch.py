"""Health monitor: pings an engine periodically while it works, to detect that it hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.errors import RunError

_MAX_INTERVAL = 5.0


class HealthMonitor:
    """Calls `ping` while the engine works, and `on_unresponsive` once if `ping` raises RunError, which it must after `seconds` without
    an answer. A hang is noticed within twice `seconds`. Any number of threads may work at the same time; one additional thread pings."""

    def __init__(self, ping: Callable[[], object], on_unresponsive: Callable[[], None], seconds: float) -> None:
        self._ping, self._on_unresponsive, self._interval = ping, on_unresponsive, min(seconds, _MAX_INTERVAL)
        self._lock = threading.Lock()
        self._workers, self._suspended = 0, False
        self._stop_event = threading.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Enclose work of the engine."""
        with self._lock:
            self._workers += 1
            if self._workers == 1 and not self._suspended:
                self._start()
        try:
            yield
        finally:
            with self._lock:
                self._workers -= 1
                if self._workers == 0:
                    self._stop_event.set()

    def suspend(self) -> None:
        """Stop pinging until `resume`, because the engine's next answers may take long."""
        with self._lock:
            self._suspended = True
            self._stop_event.set()

    def resume(self) -> None:
        with self._lock:
            if self._suspended and self._workers:
                self._start()
            self._suspended = False

    def _start(self) -> None:
        self._stop_event = threading.Event()
        threading.Thread(target=self._run, args=(self._stop_event,), name="megatron-rl-watch", daemon=True).start()

    def _run(self, stop_event: threading.Event) -> None:
        while not stop_event.wait(self._interval):
            try:
                self._ping()
            except RunError:
                if not stop_event.is_set():
                    self._on_unresponsive()
                return
