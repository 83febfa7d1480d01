"""Keep generation and weight changes apart: a change waits until no request runs, and new requests wait until it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.errors import RunError

_POLL_SECONDS = 0.05


class RequestGate:
    """Starts open. Threads that generate pass through it; one thread closes and opens it. No wait is longer than `timeout` seconds.

    Whoever is inside when it is closed with `holding` does not leave before it opens: what he has got was not proved.

    While `refusal` says something, it is what every request is refused with at once.
    """

    def __init__(self, timeout: float, refusal: str = "") -> None:
        self._timeout, self.refusal = timeout, refusal
        self._changed = threading.Condition()
        self._closed, self._holding, self._inside = False, False, 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Enclose a request. Raise RunError if it is refused or the gate stays closed."""
        if self.refusal:
            raise RunError(self.refusal)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closed, self._timeout):
                raise RunError(f"the engine's weights were being changed for {self._timeout:g} s (rollout.request_timeout)")
            self._inside += 1
        try:
            yield
            with self._changed:
                if not self._changed.wait_for(lambda: not self._holding, self._timeout):
                    raise RunError(
                        f"an answer waited {self._timeout:g} s for the proof of the engine's new weights (rollout.request_timeout)"
                    )
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def drain(self, on_wait: Callable[[], None] | None = None) -> None:
        """Close the gate and wait until no request is inside; call `on_wait` repeatedly while one is.

        If a request stays inside, open the gate again and raise RunError.
        """
        deadline = time.monotonic() + self._timeout
        self.close()
        while not self._is_empty(_POLL_SECONDS):
            if time.monotonic() > deadline:
                self.open()
                raise RunError(f"requests were still running after {self._timeout:g} s (rollout.request_timeout)")
            if on_wait is not None:
                on_wait()

    def close(self, holding: bool = False) -> None:
        """Let no request in; those inside stay. With `holding`, let none out either."""
        with self._changed:
            self._closed, self._holding = True, holding

    def open(self) -> None:
        """Let requests in, and out."""
        with self._changed:
            self._closed = self._holding = False
            self._changed.notify_all()

    def _is_empty(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, seconds)
