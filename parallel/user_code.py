"""Runs a user's own code in this process, so that it can neither end nor hang the process. No torch.

`contain` turns whatever the code does into an `Exception`, which the caller reports:

    SystemExit, KeyboardInterrupt, other BaseExceptions    a `UserCodeError`; Ctrl-C and a cluster's signals pass as they are
    os._exit                                               a `UserCodeError`
    a call without end                                     a `UserCodeError` after the limit, raised by a timer in the main thread
    os.fork                                                the child ends where it leaves the call, at the latest with this process

A timer cannot interrupt another thread, nor a library's code that never returns to Python. The run's watchdog ends those.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

IMPORT_SECONDS = 120.0
"""Longest time that the import of a module, or a trial call before a run, may take."""
_AGAIN_SECONDS, _MOST_TIMES = 1.0, 5  # code that swallows the timer's exception gets it again, and is then ended with the process
_PR_SET_PDEATHSIG = 1
_exit_process = os._exit
_call_seconds = 900.0


class _Call(NamedTuple):
    """What a thread runs inside `contain`."""

    what: str
    pid: int
    is_main: bool  # whether the thread is the main thread of this process


_calls: dict[int, _Call] = {}
"""The innermost call of each thread, by the thread's number."""


class Interrupt(KeyboardInterrupt):
    """Raised by Ctrl-C inside `contain`. Code that raises KeyboardInterrupt itself raises no Interrupt."""


class SignalExit(SystemExit):
    """Raised by the project's own signal handlers. Code that calls sys.exit raises no SignalExit."""


class UserCodeError(Exception):
    """Raised if code tried to end the process, or did not end in time. The message says which."""


class _Exit(BaseException):
    """Raised instead of os._exit."""


class _TimeLimit(BaseException):
    """Raised by the timer. Not an Exception, so that `except Exception` does not swallow it."""


def limit_calls(seconds: float) -> None:
    """Set the longest time that a call in this process may take, in seconds. 0 means no limit."""
    global _call_seconds
    _call_seconds = seconds


@contextmanager
def contain(what: str, limit: float | None = None, exit_code: int = 3) -> Iterator[None]:
    """Context manager that runs code of a user. Raise UserCodeError if the code tries to end the process, or takes longer than `limit`
    seconds (default: `limit_calls`). Exceptions pass. If nothing else stops the code, print a line with `what`, which names it, and end
    this process with `exit_code`."""
    thread = threading.get_ident()
    call, outer = _Call(what, os.getpid(), threading.current_thread() is threading.main_thread()), _calls.get(thread)
    _calls[thread], os._exit = call, _exit_unless_contained
    limit = _call_seconds if limit is None else limit
    try:
        with _time_limit(what, limit, exit_code) if call.is_main else nullcontext():
            yield
    except (Exception, Interrupt, SignalExit):
        raise
    except _TimeLimit:
        raise UserCodeError(f"it did not end within {limit:g} s") from None
    except _Exit as error:
        raise UserCodeError(str(error)) from None
    except BaseException as error:
        raise UserCodeError(describe_error(error)) from None
    finally:
        if os.getpid() != call.pid:  # a forked child must not continue as a second process of the run
            _exit_process(0)
        del _calls[thread]
        if outer is not None:
            _calls[thread] = outer


def list_running() -> list[str]:
    """Return what all threads run inside `contain` at the moment."""
    return [call.what for call in [*_calls.values()]]


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message in one short line, also of one whose message cannot be written."""
    if isinstance(error, UserCodeError):
        return " ".join(str(error).split())[:500]
    try:
        text = " ".join(str(error).split())[:500].encode(errors="replace").decode()
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    except (Exception, SystemExit):
        return f"{type(error).__name__}: its message cannot be written"


@contextmanager
def _time_limit(what: str, limit: float, exit_code: int) -> Iterator[None]:
    """Raise _TimeLimit in the block after `limit` seconds, and Interrupt for Ctrl-C. Main thread only, which receives all signals."""
    times = 0

    def handle_alarm(_: int, __: Any) -> None:
        nonlocal times
        times += 1
        if times > _MOST_TIMES:
            print(f"megatron-rl: {what} did not end within {limit:g} s, and swallows the error for it", file=sys.stderr, flush=True)
            _exit_process(exit_code)
        raise _TimeLimit

    start, interrupt = time.monotonic(), signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise_interrupt)
    alarm = signal.signal(signal.SIGALRM, handle_alarm)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, limit, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm or signal.SIG_DFL)
        if interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)
        if remaining:  # the timer of an outer block, or of someone else
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - start), 1e-3), interval)


def _raise_interrupt(_: int, __: Any) -> NoReturn:
    raise Interrupt


def _exit_unless_contained(status: int) -> NoReturn:
    """Replacement of os._exit, which no exception handler of a caller notices."""
    call = _calls.get(threading.get_ident())
    if call is not None and call.pid == os.getpid():
        raise _Exit(f"os._exit({status})")
    _exit_process(status)


def _end_with_parent() -> None:
    """End a child that a user's code forked when the run ends."""
    call = _calls.get(threading.get_ident())
    if call is not None and call.is_main and sys.platform == "linux":  # any other thread may end before the run does
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


os.register_at_fork(after_in_child=_end_with_parent)
