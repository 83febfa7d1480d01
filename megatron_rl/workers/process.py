"""Worker side of a pool: `python -m MODULE FD ARGUMENT MEMORY_MB PARENT_PID`, started by `megatron_rl.workers.pool`. A worker loads a
handler, sends ("ready", "") or ("failed", reason), then receives lists of tasks and answers each task as soon as it is done. It ends when
its pipe closes or its parent ends, even in the middle of a computation."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from parallel.plug import InputError

_PR_SET_PDEATHSIG = 1


def serve(load: Callable[[str], Callable[..., object]]) -> None:
    """Run this process as a worker until its pipe closes. `load` makes the handler of tasks from ARGUMENT."""
    fd, argument, memory_mb, parent_pid = sys.argv[1:]
    die_with_parent(int(parent_pid))
    ignore_signals_for_parent()
    limit_memory(int(memory_mb))
    channel = Connection(int(fd))
    try:
        handle = load(argument)
    except BaseException as error:
        channel.send(("failed", error.rule if isinstance(error, InputError) else describe_error(error)))
        return
    channel.send(("ready", ""))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            for task in channel.recv():
                channel.send(handle(*task))


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def ignore_signals_for_parent() -> None:
    """Ignore Ctrl-C and SIGUSR1, a cluster's warning before a time limit. Only the parent process reacts to them."""
    for name in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send `signum` to this process when the thread that started it ends. Only SIGKILL also ends a stopped process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent_pid:  # the parent ended before the call
            os.kill(os.getpid(), signum)


def limit_memory(memory_mb: int) -> None:
    """Limit the address space of this process to `memory_mb` MiB."""
    limit = memory_mb * 1024 * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
