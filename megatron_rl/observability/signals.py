"""Handles SIGTERM, which clusters send before they kill a job, SIGUSR1, their earlier warning, and SIGHUP, the end of a terminal.

The first signal ends a command at once, except where something would be lost or other ranks wait (`stopping`): a training run first brings
its weights to the end of a policy version, stops on all ranks at the next `check_stop`, and writes a checkpoint. The second signal ends a
rank at once. No torch until a run checks for a stop.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rl.errors import RunError
from parallel.plug import SignalExit

_ONE_SIGNAL_SECONDS = 0.5
"""Signals in such a short time count as one: a launcher passes on what its whole process group has received."""

_received: list[tuple[str, float]] = []  # name and time of each signal that counts
_at_once = True


class StopError(RunError):
    """Raised on all ranks when any rank receives a stop signal."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message, log_tail)
        self.exit_code = _exit_code(signal.SIGHUP if message.endswith(signal.SIGHUP.name) else signal.SIGTERM)


def install_signal_handlers() -> None:
    """Install the handlers, and forget earlier signals. A SIGHUP that this process ignores, as under nohup, stays ignored."""
    _received.clear()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


@contextmanager
def stopping(at_once: bool) -> Iterator[None]:
    """Context manager that says whether the first signal ends the block at once, by a SignalExit, or is left to the next `check_stop`."""
    global _at_once
    before, _at_once = _at_once, at_once
    try:
        yield
    finally:
        _at_once = before


@contextmanager
def stoppable() -> Iterator[None]:
    """Context manager for work of rank 0 for which all ranks wait: the first signal ends it at once, by a StopError."""
    try:
        if _received:
            raise SignalExit
        with stopping(at_once=True):
            yield
    except SignalExit:
        if is_second():
            raise
        raise _stop_error() from None


def is_second() -> bool:
    """Return whether a second signal asks this rank to end without a checkpoint."""
    return len(_received) > 1


def check_stop() -> None:
    """Raise StopError on all ranks if any rank has received a stop signal. Collective."""
    from megatron_rl.distributed import raise_on_all_ranks

    raise_on_all_ranks(_stop_error() if _received else None)


def prefer_stop_error(error: BaseException, alone: bool) -> BaseException:
    """Return StopError if this rank has received a stop signal, else `error`. A cluster also signals the child processes of a rank, so a
    stop may first appear as a lost engine. Unless `alone`, any rank's signal counts, and all ranks must call this."""
    if isinstance(error, StopError):
        return error
    own = _stop_error() if _received else None
    if alone:
        return own or error
    from megatron_rl.distributed import gather_errors

    return next((each for each in gather_errors(own) if isinstance(each, StopError)), error)


def _stop_error() -> StopError:
    return StopError(f"stopped by {_received[0][0]}")


def _exit_code(number: int) -> int:
    """Return the exit code that shells give a process which the signal ended, and SIGTERM's for SIGUSR1, which only announces it."""
    return 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)


def _handle(number: int, _: Any) -> None:
    now = time.monotonic()
    if _received and now - _received[-1][1] < _ONE_SIGNAL_SECONDS:
        return
    _received.append((signal.Signals(number).name, now))
    if _at_once or is_second():
        raise SignalExit(_exit_code(number))
