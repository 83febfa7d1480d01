"""The number of threads of each process, and products that have the same bits however many threads share them."""

import os
import threading

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.kernels import batch_invariant
from megatron_rl.precision import threads


@pytest.fixture
def lent(monkeypatch):
    """Three threads for shared work, one for everything else, as in an engine."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_thread_counts", [])
    threads.lend_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [1500, 1025, 129, 17])
def test_a_large_product_has_the_same_bits_however_many_threads_share_it(lent, monkeypatch, columns):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 768, generator=generator), torch.randn(columns, 768, generator=generator).requires_grad_()
    monkeypatch.setattr(batch_invariant, "_SHARED_PRODUCT", 1 << 40)
    with torch.no_grad():
        alone = [batch_invariant.invariant_matmul(x[:rows], weight) for rows in (1, 16, 40)]
        monkeypatch.setattr(batch_invariant, "_SHARED_PRODUCT", 1)
        shared = [batch_invariant.invariant_matmul(x[:rows], weight) for rows in (1, 16, 40)]
        with batch_invariant.InvariantMatmuls():
            linear = F.linear(x, weight)
    assert all(map(torch.equal, shared, alone)) and torch.equal(linear, alone[-1]) and not shared[0].requires_grad
    recorded = batch_invariant.invariant_matmul(x, weight)
    assert torch.equal(recorded, alone[-1]) and recorded.requires_grad


def test_parts_cover_the_whole_once_and_run_alone(lent):
    counts, seen = [], torch.zeros(50, dtype=torch.int64)

    def count(part: slice) -> None:
        seen[part] += 1
        counts.append((torch.get_num_threads(), len(seen[part])))

    threads.run_in_parts(count, 50, 16)
    assert seen.tolist() == [1] * 50 and sorted(counts) == [(1, 16), (1, 16), (1, 18)]
    callers = []
    threads.run_in_parts(lambda _: callers.append(threading.current_thread()), 31, 16)
    assert callers == [threading.current_thread()], "a single part needs no other thread"
    with threads.all_threads():
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 1


def test_threads_of_a_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads.count_threads(processes) for processes in (1, 3, 20)] == [8, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [threads.count_threads(processes) for processes in (1, 2)] == [2, 4], "torchrun sets it for several"
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert threads.count_threads(1) == 4, "the second number is for nested regions"
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert threads.count_threads(1) == 8
