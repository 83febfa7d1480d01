"""Request gate: separates generation from weight changes. A change waits until no request runs; new requests wait until it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.errors import RunError

_POLL_SECONDS = 0.05


class AnswersDroppedError(Exception):
    """The answers of a request were computed with weights that were never proved. The request must be repeated."""


class RequestGate:
    """Gate that generating threads pass through. Another thread closes and opens it. Initially open. No wait is longer than `timeout`
    seconds. While the gate is holding, no thread can leave it, because its answer is not proved yet. If `refusal` is set, every request
    is refused with this message immediately."""

    def __init__(self, timeout: float, refusal: str = "") -> None:
        self._timeout, self.refusal = timeout, refusal
        self._changed = threading.Condition()
        self._closed, self._inside, self._drops = False, 0, 0
        self.holding = False  # whether no request may leave

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Enclose a request. Raise RunError if it is refused or the gate stays closed, and AnswersDroppedError if its answers must be
        dropped."""
        if self.refusal:
            raise RunError(self.refusal)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closed, self._timeout):
                raise RunError(f"the engine's weights were being changed for {self._timeout:g} s (rollout.request_timeout)")
            self._inside += 1
            drops = self._drops
        try:
            yield
            with self._changed:
                if not self._changed.wait_for(lambda: not self.holding or self._drops > drops, self._timeout):
                    raise RunError(
                        f"an answer waited {self._timeout:g} s for the proof of the engine's new weights (rollout.request_timeout)"
                    )
                if self._drops > drops:
                    raise AnswersDroppedError
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def drain(self, on_wait: Callable[[], None] | None = None) -> None:
        """Close the gate and wait until no request is inside. Call `on_wait` repeatedly while requests are inside. Held answers are
        dropped. If a request stays inside, open the gate again and raise RunError."""
        deadline = time.monotonic() + self._timeout
        with self._changed:
            self._drops += self.holding
            self._closed, self.holding = True, False
            self._changed.notify_all()
        while not self._is_empty(_POLL_SECONDS):
            if time.monotonic() > deadline:
                self.open()
                raise RunError(f"requests were still running after {self._timeout:g} s (rollout.request_timeout)")
            if on_wait is not None:
                on_wait()

    def hold(self, closed: bool) -> None:
        """Let no request out. If `closed`, let no request in either."""
        with self._changed:
            self._closed, self.holding = closed, True
            self._changed.notify_all()

    def open(self) -> None:
        """Let requests in and out."""
        with self._changed:
            self._closed = self.holding = False
            self._changed.notify_all()

    def _is_empty(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, seconds)
