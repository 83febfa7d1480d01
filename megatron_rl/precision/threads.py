"""Number of threads of torch's CPU operators. Operators whose bits depend on it run in one thread, others in all."""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from megatron_rl.config.launch import read_number

_thread_counts: list[int] = []  # counts that open contexts restore, outermost first


def count_threads(processes: int) -> int:
    """Return the threads of each of `processes` that share the cores of this one. A single process gets at most OMP_NUM_THREADS, which
    torchrun sets to 1 for several processes."""
    cores = len(os.sched_getaffinity(0))
    wanted, *_nested = os.environ.get("OMP_NUM_THREADS", "").split(",")  # one limit for each level of nested parallelism
    limit = read_number("OMP_NUM_THREADS", wanted, 1, 1 << 20) if wanted.strip() else cores
    return min(cores, limit) if processes == 1 else max(cores // processes, 1)


def lend_threads(count: int) -> None:
    """Let `all_threads` use `count` threads for the rest of the process, and run everything else in one thread."""
    torch.set_num_threads(1)
    _thread_counts.insert(0, count)


def single_threaded() -> AbstractContextManager[None]:
    """Return a context manager in which torch's CPU operators run in the calling thread only."""
    return _threads(1)


def all_threads() -> AbstractContextManager[None]:
    """Return a context manager that undoes `single_threaded`, for operators whose bits do not depend on the number of threads."""
    return _threads(_count_all_threads())


def run_in_parts(function: Callable[[slice], object], length: int, unit: int) -> None:
    """Call `function` with slices of range(length), at most one per thread, and run operators single-threaded and without gradient within.
    Slices start at multiples of `unit` and are at least `unit` long, unless there is only one slice."""
    units = length // unit
    parts = min(_count_all_threads(), units)
    run = torch.inference_mode(torch.is_inference_mode_enabled())(torch.no_grad()(function))  # modes belong to a thread
    if parts <= 1:
        run(slice(length))
        return
    starts = [unit * (units * part // parts) for part in range(parts)]
    with single_threaded():
        list(_pool(parts).map(run, map(slice, starts, [*starts[1:], length])))


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "operator", initializer=lambda: torch.set_num_threads(1))


def _count_all_threads() -> int:
    return _thread_counts[0] if _thread_counts else torch.get_num_threads()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    _thread_counts.append(before)
    try:
        yield
    finally:
        _thread_counts.pop()
        torch.set_num_threads(before)
