"""The keeper of a child process that runs other people's code: a small process between the two, which leaves nothing of the child behind.

    python -I -S keeper.py PARENT_PID FDS WORD...

It starts the program WORD..., which inherits the descriptors FDS ("3,5" or ""). Everything that the program forks is below the keeper, also
what left its session or lost its parent, because Linux gives orphans to the nearest subreaper. Once the program ends, the keeper gets
SIGTERM, or the process PARENT_PID ends, the keeper kills all processes below it and ends as the program did. It watches the process that
started it and not, as Linux's parent-death signal does, the thread. This file is run by its path, so it imports only the standard library.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
LONGEST_END = 5.0
"""Seconds after which the keeper no longer waits for processes that it has killed, or for a resource tracker."""
MOST_ERROR_BYTES = 1 << 16
"""Bytes of a program's standard error that the keeper passes on."""
_LEFT_OUT = b"\n[a worker wrote more to its standard error; the rest is left out]\n"
_MEASURE_SECONDS, _MEASURE_SHARE = 1.0, 0.02
"""Seconds between two measurements of the memory, and the share of a core that they may take."""
_AT_ONCE = 4096  # bytes that a pipe which is ready for writing takes without blocking


class MemoryLimit(NamedTuple):
    """Limit of the resident memory of all processes below the keeper. Their address space is free: V8, JVMs, and Chromium reserve much."""

    option: str  # that sets it, in MiB
    memory_mb: int
    errors: int  # descriptor that gets a line if it is exceeded


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def fork_kept_child(parent: int, files: Sequence[int], relay: bool = False, limit: MemoryLimit | None = None) -> None:
    """Fork. Return in the child, which leads a session of its own. This process never returns: it keeps the child until that ends or the
    process `parent`, its parent, does. `files`: descriptors that only the child needs. `relay`: pass on only the first bytes of the child's
    standard error. `limit`: what the child and all below it may hold in memory, among `files`."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # a stopped keeper notices it too
    if os.getppid() != parent:  # it has ended already
        os._exit(0)
    parent_fd, keeper = os.pidfd_open(parent), os.getpid()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.signal(signal.SIGTERM, lambda *_: None) or signal.SIG_DFL
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    errors, remote = os.pipe() if relay else (-1, -1)
    child = os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
        if relay:
            os.dup2(remote, 2)
        for file in (parent_fd, woken, wake, *((errors, remote) if relay else ())):
            os.close(file)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(0)
        return
    try:
        for file in (*(file for file in files if not (limit and file == limit.errors)), *((remote,) if relay else ())):
            os.close(file)
        _watch(child, parent_fd, woken, errors, limit)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    _end_as(_end_everything(child))


def _watch(child: int, parent_fd: int, woken: int, errors: int, limit: MemoryLimit | None) -> None:
    """Return once the child or the parent has ended, a signal came, or the limit is exceeded."""
    wait = _MEASURE_SECONDS if limit else None
    poll, allowed, child_fd = select.poll(), MOST_ERROR_BYTES, os.pidfd_open(child)
    for file in (child_fd, parent_fd, woken, *((errors,) if errors >= 0 else ())):
        poll.register(file, select.POLLIN)
    while True:
        ready = {file for file, _ in poll.poll(wait and 1000 * wait)}
        if errors in ready:
            text = os.read(errors, 1 << 16)
            if not text:
                poll.unregister(errors)
            allowed = _pass_on(text, allowed)
        elif ready:
            return
        if limit:
            start = time.monotonic()
            if _exceeds(limit):
                return
            wait = max(_MEASURE_SECONDS, (time.monotonic() - start) / _MEASURE_SHARE)


def _exceeds(limit: MemoryLimit) -> bool:
    """Return whether the processes below this one hold more memory than they may, and say so. Pages that several of them share, as forks
    do, are counted once, but only if the sum with them is too large, because that takes long."""
    most, pids = limit.memory_mb << 20, _find_children()
    pages = sum(int(text.split()[1]) for pid in pids if (text := _read(pid, "statm")))
    if pages * resource.getpagesize() <= most:
        return False
    lines = [line.split() for pid in pids for line in _read(pid, "smaps_rollup").splitlines() if line.startswith("Pss:")]
    held = sum(int(words[1]) << 10 for words in lines) or pages * resource.getpagesize()  # where Linux does not say what is shared
    if held <= most:
        return False
    text = f"{limit.option} = {limit.memory_mb}: the agent and its processes hold {held >> 20} MiB in memory; raise it"
    os.set_blocking(limit.errors, False)
    with contextlib.suppress(OSError):
        os.write(limit.errors, f"\n{text}\n".encode())
    return True


def _find_children() -> list[int]:
    """Return the processes below this one, without a look at all others of the machine if Linux lists children."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return _find_descendants()
    found = [os.getpid()]
    for pid in found:  # it grows meanwhile
        with contextlib.suppress(OSError):
            found += [int(word) for task in os.listdir(f"/proc/{pid}/task") for word in _read(pid, f"task/{task}/children").split()]
    return found[1:]


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace") as file:
        return file.read()
    return ""


def _pass_on(text: bytes, allowed: int) -> int:
    """Write at most `allowed` bytes to standard error, but never wait for its reader. Return how many bytes are allowed still."""
    if not allowed or not text:
        return allowed
    passed = text[:allowed] + (_LEFT_OUT if len(text) >= allowed else b"")
    writable = select.poll()
    writable.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        while passed and any(event & select.POLLOUT for _, event in writable.poll(0)):
            passed = passed[os.write(2, passed[:_AT_ONCE]) :]
    return max(0, allowed - len(text))


def _end_everything(child: int) -> int:
    """Kill all processes below this one. Return how the child ended. Python's resource trackers get time to remove shared memory, which
    they do once the processes that they serve have ended."""
    status, deadline = int(signal.SIGKILL), time.monotonic() + LONGEST_END
    while True:
        try:
            ended, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended:
            status = code if ended == child else status
            continue
        late = time.monotonic() > deadline
        for pid in _find_descendants():
            if late or not is_tracker(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if late:
            return status
        time.sleep(0.002)


def _find_descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in _list_processes():
        children.setdefault(parent, []).append(pid)
    found = [os.getpid()]
    for pid in found:  # it grows meanwhile
        found += children.get(pid, [])
    return found[1:]


def _list_processes() -> Iterator[tuple[int, int]]:
    """Yield process id and parent of every process that has not ended."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z" or int(parent) == os.getpid():
                    yield int(name), int(parent)


def is_tracker(pid: int) -> bool:
    """Return whether this is a resource tracker of Python, which ends by itself once it has cleaned up /dev/shm."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"multiprocessing.resource_tracker" in file.read()
    return False


def _end_as(status: int) -> NoReturn:
    """End this process as a child with this status ended."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has written its core
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def ignore_signals_for_parent() -> None:
    """Ignore Ctrl-C, SIGHUP, and SIGUSR1, a cluster's warning before a time limit. Only the parent process reacts to them."""
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)


def become(words: list[str]) -> NoReturn:
    """Replace this process with a program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
        os._exit(127)


def main() -> None:
    parent, files, *words = sys.argv[1:]
    ignore_signals_for_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    fork_kept_child(int(parent), [int(file) for file in files.split(",") if file], relay=True)
    become(words)


if __name__ == "__main__":
    main()
