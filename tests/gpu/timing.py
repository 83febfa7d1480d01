"""Timing of cases in turns, so that a slow phase of the machine affects all of them, and functions run in a child process."""

import importlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Hashable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch
from support.processes import end, family

Case = TypeVar("Case", bound=Hashable)


def time_call(call):
    """Return the seconds until the device is done."""
    _synchronize()
    start = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - start


def time_kernels(call):
    """Return the seconds that the device computes; without a GPU, the same as `time_call`."""
    if not torch.cuda.is_available():
        return time_call(call)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def time_in_turns(cases, repeat, warmup=1, timer=time_call):
    """Return the median seconds of every case over `repeat` turns, after `warmup` turns in which kernels are compiled."""
    seconds = {case: [] for case in cases}
    for _ in range(warmup + repeat):
        for case, call in cases.items():
            seconds[case].append(timer(call))
    return {case: statistics.median(values[warmup:]) for case, values in seconds.items()}


def _synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_in_child(function, *arguments, seconds=900):
    """Return `function(*arguments)`, called in a new process, which is ended with all its children. Propagates its errors."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the child needs the memory
    start = importlib.import_module, ("megatron_rl.mcore",)  # before Megatron, which needs it on a machine without Triton
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), *start) as pool:
        try:
            return pool.submit(function, *arguments).result(seconds)
        finally:
            for process in multiprocessing.active_children():
                if process in (pool._processes or {}).values():
                    end(family(process.pid))
