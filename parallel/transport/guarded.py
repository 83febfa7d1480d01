"""Guards a transport of the user's own: whatever its outbox or inbox does becomes a PlugError that names it, on either side of a sync."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from json import dumps
from typing import TYPE_CHECKING, Any

from parallel.chunking import Chunk
from parallel.plug import PlugError
from parallel.transport.base import Inbox, Link, Outbox, Route, Transport, TransportSettings

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_Guard = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class GuardedTransport(Transport):
    """A transport of the user's own. `call` is the context manager of its calls, `Plug.call`."""

    own: Transport = field(kw_only=True)
    call: Callable[..., AbstractContextManager[None]] = field(kw_only=True)

    def make_outbox(self, settings: TransportSettings, rank: int, chunks: Sequence[Chunk], route: Route | None = None) -> Outbox:
        return _GuardedOutbox(lambda: self.own.make_outbox(settings, rank, chunks, route), self._guard(settings.timeout))

    def make_inbox(self, link: Link, rank: int, chunks: Sequence[Chunk]) -> Inbox:
        return _GuardedInbox(lambda: self.own.make_inbox(link, rank, chunks), self._guard(link.timeout))

    def _guard(self, timeout: float) -> _Guard:
        return lambda: self.call(2 * timeout, self.lost_errors)  # a transport itself ends its waits after `timeout`


class _Guarded:
    """What the guards of both sides share. A subclass sets `_own` inside of the guard."""

    _own: Outbox | Inbox

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard

    def start(self, chunks: Sequence[Chunk]) -> None:
        with self._guard():
            self._own.start([*chunks])

    def finish(self) -> None:
        with self._guard():
            self._own.finish()

    def close(self) -> None:
        """Close this side. An error is only logged: it would hide why the connection is closed."""
        try:
            with self._guard():
                self._own.close()
        except (PlugError, OSError) as error:
            _log.warning("%s", error)


class _GuardedOutbox(_Guarded, Outbox):
    _own: Outbox

    def __init__(self, make: Callable[[], Outbox], guard: _Guard) -> None:
        super().__init__(guard)
        with guard():
            self._own = make()
            self.address = self._own.address
            dumps(self.address)  # raises here if it is not JSON

    def open(self, addresses: Mapping[int, Any]) -> None:
        with self._guard():
            self._own.open(dict(addresses))

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        with self._guard():
            return _check_bytes(self._own.buffer(chunk), chunk)

    def send(self, chunk: Chunk) -> None:
        with self._guard():
            self._own.send(chunk)


class _GuardedInbox(_Guarded, Inbox):
    _own: Inbox

    def __init__(self, make: Callable[[], Inbox], guard: _Guard) -> None:
        super().__init__(guard)
        with guard():
            self._own = make()

    def receive(self, chunk: Chunk) -> torch.Tensor:
        with self._guard():
            return _check_bytes(self._own.receive(chunk), chunk)

    def release(self, chunk: Chunk) -> None:
        with self._guard():
            self._own.release(chunk)


def _check_bytes(flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the buffer of a chunk. Raise TypeError if it is something else."""
    import torch  # reading a configuration does not load it

    if not isinstance(flat, torch.Tensor) or flat.dtype != torch.uint8 or flat.shape != (chunk.nbytes,) or not flat.is_contiguous():
        found = f"{flat.dtype} {list(flat.shape)}" if isinstance(flat, torch.Tensor) else type(flat).__name__
        raise TypeError(f"a buffer must be a contiguous tensor, torch.uint8 [{chunk.nbytes}], not {found}")
    return flat
