"""The number of threads of each process, and products that have the same bits however many threads share them."""

import os
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.attention import reference as attention
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision import threads
from megatron_rl.precision.fp8 import round_trip_128x1


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


def test_tree_products_attention_and_quantized_values_have_the_bits_of_one_thread(lent, monkeypatch):
    """Also of tensors that require a gradient, and in inference mode. The last group of tokens is partial."""
    generator, ran = torch.Generator().manual_seed(0), list[int]()
    x, weight = (torch.randn(rows, 512, generator=generator).requires_grad_() for rows in (1700, 600))
    lengths = [5, 31, 33, 70, 20, 32]
    heads = [torch.randn(sum(lengths), 2, 64, generator=generator).requires_grad_() for _ in range(3)]
    whole = threads.run_in_parts

    def compute() -> list[torch.Tensor]:
        attended = attention.grouped_attention(*heads, attention.group_by_length(lengths))
        padded = F.pad(x.detach(), (0, 0, 0, -len(x) % 128))
        return [tree.multiply(x, weight), attended, round_trip_128x1(x.detach(), "pow2"), round_trip_128x1(padded, "pow2")]

    def count(*arguments: Any) -> None:
        ran.append(threads._count_all_threads())
        whole(*arguments)

    for module in (attention, threads):
        monkeypatch.setattr(module, "run_in_parts", count)
    shared = compute()
    with torch.inference_mode():
        served = compute()
    gradients = torch.autograd.grad(shared[1].sum(), heads)
    monkeypatch.setattr(threads, "_thread_counts", [])
    alone = compute()
    assert {3, 1} == {*ran} and ran.count(1) * 2 == ran.count(3) and not shared[0].requires_grad
    assert all(map(torch.equal, shared, alone)) and all(map(torch.equal, served, alone))
    assert torch.equal(alone[2], alone[3][: len(x)]), "zeros change no group of tokens"
    assert all(map(torch.equal, gradients, torch.autograd.grad(alone[1].sum(), heads)))


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
