"""What a worker has used up. A completion may leave memory, threads or descriptors behind in the worker that judged it; a worker that has
run out, or has less than it began with, is replaced, so that no other completion pays for it."""

import errno
import os
import sys
from contextlib import suppress

MOST_THREADS = 32
"""Threads that tasks may leave in a worker before it is replaced, apart from those that the first task of a kind starts."""
MOST_DESCRIPTORS = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")
_EXHAUSTED = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN}
_NO_THREAD = "can't start new thread"

_exhaustions: list[None] = []


def note_exhaustion(error: BaseException) -> None:
    """Note whether this error, or one that it follows from, says that the process has run out of memory, threads or descriptors."""
    for _ in range(16):
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _EXHAUSTED):
            _exhaustions.append(None)
        with suppress(Exception):  # its message may raise
            if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
                _exhaustions.append(None)
        following = error.__cause__ or error.__context__
        if following is None:
            return
        error = following


def take_exhaustion() -> bool:
    """Return whether an exhaustion was noted since the last call."""
    noted = bool(_exhaustions)
    _exhaustions.clear()
    return noted


class Usage:
    """Compares what a worker uses after a task with what it used before the tasks, not counting what the first task of a kind loads."""

    def __init__(self, memory_mb: int) -> None:
        self._most = (memory_mb * 2**20 // 2, MOST_THREADS, MOST_DESCRIPTORS)
        self._streams, self._folder, self._recursion_limit = _identify_streams(), os.getcwd(), sys.getrecursionlimit()
        self._before, self.has_leftovers = _measure(), False
        self._threads = self._before[1]

    def has_grown(self, is_first: bool) -> bool:
        """Return whether tasks have left more than half of the memory limit, many threads or descriptors behind, or have closed a standard
        stream or lowered the recursion limit. `has_leftovers` tells afterwards whether threads of them still run. The working directory is
        set back."""
        try:
            os.chdir(self._folder)
            now = _measure()
            if _identify_streams() != self._streams or sys.stdout.closed or sys.stderr.closed:
                return True
            if sys.getrecursionlimit() < self._recursion_limit:
                return True
        except (OSError, MemoryError, AttributeError):  # no descriptor or memory is left to measure with, or no stream
            return True
        self.has_leftovers = now[1] > self._threads
        grown = any(after - before > most for after, before, most in zip(now, self._before, self._most, strict=True))
        if is_first:
            self._before = now
            return False
        return grown


def _measure() -> tuple[int, int, int]:
    """Return bytes of address space, and numbers of threads and descriptors."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    return pages * _PAGE, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _identify_streams() -> list[tuple[int, int]]:
    return [(status.st_dev, status.st_ino) for status in map(os.fstat, range(3))]
