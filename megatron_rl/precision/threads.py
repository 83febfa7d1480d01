"""How many threads torch's CPU operators use. An operator whose bits depend on it runs in one, the others in all."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_given: list[int] = []
"""What open contexts restore, outermost first."""


def count_threads(processes: int) -> int:
    """Return the threads for each of `processes` that share this one's cores; for a single one at most OMP_NUM_THREADS, which torchrun
    sets to 1 for several."""
    cores = len(os.sched_getaffinity(0))
    wanted, *_nested = (os.environ.get("OMP_NUM_THREADS") or str(cores)).split(",")
    return min(cores, int(wanted)) if processes == 1 else max(cores // processes, 1)


def lend_threads(count: int) -> None:
    """Give `all_threads` this many for the rest of the process, which runs everything else in one."""
    torch.set_num_threads(1)
    _given.insert(0, count)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch's CPU operators in the calling thread alone."""
    with _threads(1):
        yield


@contextmanager
def all_threads() -> Iterator[None]:
    """Undo `single_threaded` for operators whose bits do not depend on the number of threads."""
    with _threads(_count_given()):
        yield


def run_in_parts(function: Callable[[slice], object], length: int, least: int) -> None:
    """Call function with slices of range(length), at most one for each of all threads, where operators run alone. The slices begin at
    multiples of `least` and have at least as many members, unless one has all."""
    units = length // least
    parts = min(_count_given(), units)
    if parts <= 1:
        function(slice(length))
        return
    starts = [least * (units * part // parts) for part in range(parts)]
    with single_threaded():
        list(_pool(parts).map(function, map(slice, starts, [*starts[1:], length])))


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "operator", initializer=lambda: torch.set_num_threads(1))


def _count_given() -> int:
    return _given[0] if _given else torch.get_num_threads()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    _given.append(before)
    try:
        yield
    finally:
        _given.pop()
        torch.set_num_threads(before)
