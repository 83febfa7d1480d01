"""Notices an engine that hangs: while it works it is asked something small now and then, and must answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.errors import RunError

_LONGEST_PAUSE = 5.0


class Watch:
    """`ask` raises RunError where the engine does not answer within `seconds`; `give_up` is called once it did not. An engine that is
    silent is noticed within twice that time.

    An engine may be watched by several threads at a time; one more thread asks.
    """

    def __init__(self, ask: Callable[[], object], give_up: Callable[[], None], seconds: float) -> None:
        self._ask, self._give_up, self._pause = ask, give_up, min(seconds, _LONGEST_PAUSE)
        self._lock = threading.Lock()
        self._watchers, self._rests = 0, False
        self._over = threading.Event()

    def begin(self) -> None:
        """From here on the engine is at work."""
        with self._lock:
            self._watchers += 1
            if self._watchers == 1 and not self._rests:
                self._start()

    def end(self) -> None:
        """One work is done."""
        with self._lock:
            self._watchers -= 1
            if self._watchers == 0:
                self._over.set()

    def rest(self) -> None:
        """Until `go_on` it is not asked, whoever works: its next answers may take long."""
        with self._lock:
            self._rests = True
            self._over.set()

    def go_on(self) -> None:
        """Ends that."""
        with self._lock:
            if self._rests and self._watchers:
                self._start()
            self._rests = False

    def _start(self) -> None:
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(self._over,), name="megatron-rl-watch", daemon=True).start()

    @contextmanager
    def working(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def _run(self, over: threading.Event) -> None:
        while not over.wait(self._pause):
            try:
                self._ask()
            except RunError:
                if not over.is_set():
                    self._give_up()
                return
