"""Worker side of a pool: `python -m MODULE FD ARGUMENT MEMORY_MB PARENT_PID`, started by `megatron_rl.workers.pool`. A worker loads a
handler, sends ("ready", "") or ("failed", reason), then receives lists of tasks and answers each task as soon as it is done. It ends when
its pipe closes or its parent ends, even in the middle of a computation."""

import contextlib
import ctypes
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

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


_seeders: dict[str, Callable[[Any], object]] = {}
"""What seeds a library that is not imported yet."""


class _SeedAtImport(MetaPathFinder):
    """Seeds a library when it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        seed = _seeders.pop(name, None)
        spec = PathFinder.find_spec(name, path, target) if seed else None
        if seed and spec and (loader := spec.loader):
            execute = loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                seed(module)

            loader.exec_module = run  # type: ignore[method-assign]
        return spec


def seed_libraries(*parts: int) -> None:
    """Seed the global random numbers of Python, NumPy and torch from these numbers. A library that is not imported yet is seeded when it
    is."""
    random.seed("/".join(map(str, parts)))
    for_numpy, for_torch = random.getrandbits(32), random.getrandbits(63)
    _seeders.update(numpy=lambda numpy: numpy.random.seed(for_numpy), torch=lambda torch: torch.manual_seed(for_torch))
    for name in _seeders.keys() & sys.modules.keys():
        _seeders.pop(name)(sys.modules[name])
    if not any(isinstance(finder, _SeedAtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _SeedAtImport())


def describe_error(error: BaseException) -> str:
    """Return type and message of any exception, also of one whose message cannot be written."""
    try:
        return f"{type(error).__name__}: {error}"[:500].encode(errors="replace").decode()
    except Exception:
        return f"{type(error).__name__}: its message cannot be written"


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
