"""Standard streams that outlive their reader: `train | head`, a `tee` that dies, a terminal that is closed. Output that nobody can receive
is dropped and never ends a command."""

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ESTALE, errno.ECONNRESET)
"""Errors after which nothing can be written any more. After any other, such as a full disk, the next line is tried again."""

_losses: dict[str, str] = {}  # line about each stream that lost output, until it is taken


class _Stream(io.FileIO):
    """The end of a standard stream. Its descriptor stays open, for the processes that inherit it."""

    lost = False

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        count = len(rest)
        while rest:
            try:
                written = super().write(rest)
            except OSError as error:
                self._lose(error)
                break
            if written is None:  # another program has made a shared terminal or pipe non-blocking
                select.select([], [self], [])
            else:
                rest = rest[written:]
        return count

    def _lose(self, error: OSError) -> None:
        if not self.lost:
            name = "standard output" if self.fileno() == 1 else "standard error"
            _losses[name] = f"{name} cannot be written ({error.strerror}); the run goes on, and run.log has every line"
        self.lost = True
        if error.errno in _GONE:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)


def keep_streams() -> None:
    """Replace sys.stdout and sys.stderr by streams that drop what cannot be written. Descriptors 0 to 2 that are closed are opened, so that
    no other file gets their numbers."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    sys.stdout, sys.stderr = _keep(sys.stdout, 1), _keep(sys.stderr, 2)


def take_losses() -> list[str]:
    """Return one line about each stream that has lost output since the last call, at most one for each stream."""
    return [_losses.popitem()[1] for _ in [*_losses]]


def _keep(given: TextIO | None, descriptor: int) -> TextIO:
    stream = _Stream(descriptor, "w", closefd=False)
    if given is None:
        return io.TextIOWrapper(stream, "utf-8", "backslashreplace")
    given.flush()
    unbuffered = getattr(given, "write_through", False)
    buffer: Any = stream if unbuffered else io.BufferedWriter(stream)
    lines = getattr(given, "line_buffering", False)
    errors = "backslashreplace" if given.errors == "strict" else given.errors  # a character that the console has not ends no command
    return io.TextIOWrapper(buffer, given.encoding, errors, line_buffering=lines, write_through=unbuffered)
