"""Worker side of a pool: `python -m MODULE FD ARGUMENT MEMORY_MB`, started by `megatron_rl.workers.pool`. A worker loads a handler, sends
an answer with the number -1, then receives tasks and answers each as soon as it is done. It ends when its socket closes, and with its
keeper. Tasks and answers are JSON."""

import base64
import fcntl
import json
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from megatron_rl.workers import plain
from megatron_rl.workers.frames import FrameError, pack, receive_frame
from megatron_rl.workers.keeper import PR_SET_PDEATHSIG, ignore_signals_for_parent, prctl
from megatron_rl.workers.usage import Usage, note_exhaustion, take_exhaustion
from parallel import plug
from parallel.plug import InputError

READY = -1
"""Number of a worker's first answer."""
_HIGHEST_DESCRIPTOR = 1023  # where the socket is out of the way of code that closes or reuses descriptors


def serve(load: Callable[[str], Callable[..., object]], *classes: type) -> None:
    """Run this process as a worker until its socket closes. `load` makes the handler of tasks from ARGUMENT; a handler returns what JSON
    can express, and bytes. `classes` are the dataclasses among the arguments of tasks."""
    fd, argument, memory_mb = sys.argv[1:]
    ignore_signals_for_parent()
    channel, own = _take_socket(int(fd)), os.getpid()
    limit_memory(int(memory_mb))
    try:
        handle = load(argument)
    except BaseException as raised:
        _answer(channel, READY, error=raised.rule if isinstance(raised, InputError) else describe_error(raised))
        return
    _answer(channel, READY)
    usage = Usage(int(memory_mb))
    while True:
        try:
            number, is_first, arguments = plain.load(receive_frame(channel), classes)
        except (EOFError, ConnectionError):
            return
        error, result = "", None
        try:
            result = handle(*arguments)
        except BaseException as raised:  # libraries raise SystemExit and their own BaseExceptions; none may end the worker
            error = describe_error(raised)
        if os.getpid() != own:  # the handler has forked, and both have returned
            os._exit(0)
        exhausted, grown = take_exhaustion(), usage.has_grown(is_first)
        _answer(channel, number, result=result, error=error, exhausted=exhausted, grown=grown, has_leftovers=usage.has_leftovers)
        if exhausted or grown:
            os._exit(0)  # the pool starts another


def _take_socket(fd: int) -> socket.socket:
    """Return the worker's socket, at a descriptor that programs started by the handler do not inherit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(soft - 1, _HIGHEST_DESCRIPTOR))
    os.close(fd)
    return socket.socket(fileno=high)


def _answer(channel: socket.socket, number: int, **fields: object) -> None:
    try:
        frame = pack(_to_json(number, fields))
    except (TypeError, ValueError, RecursionError, FrameError) as error:
        frame = pack(_to_json(number, fields | {"result": None, "error": f"the answer cannot be sent: {describe_error(error)}"}))
    channel.sendall(frame)


def _to_json(number: int, fields: dict[str, object]) -> bytes:
    return json.dumps({"number": number, **fields}, allow_nan=False, default=lambda value: base64.b64encode(value).decode()).encode()


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
    """Return type and message of any exception in one line. Note whether it shows that this process ran out of something, after which a
    worker is replaced."""
    note_exhaustion(error)
    return plug.describe_error(error)


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send `signum` to this process when the thread that started it ends. Only SIGKILL also ends a stopped process."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent_pid:  # the parent ended before the call
            os.kill(os.getpid(), signum)


def limit_memory(memory_mb: int) -> None:
    """Limit the address space of this process to `memory_mb` MiB."""
    limit = memory_mb * 1024 * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
