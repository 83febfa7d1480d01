"""The order of turns in forward passes, and the order in which autograd runs the backward passes of two micro-batches."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.mcore.passes import two_batch
from megatron_rl.mcore.passes.two_batch import PerMicroBatch, get_turn, give_turn, is_under_way, run_in_turns


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch):
    monkeypatch.setattr(two_batch, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=contextlib.nullcontext))


def work(number: int, log: list, parts: int = 3):
    def run() -> int:
        for part in range(parts):
            assert get_turn() == number and is_under_way()
            log.append((number, part))
            give_turn()
        return number

    return run


@pytest.mark.parametrize(
    "parts, late, order",
    [
        ([3, 3], False, [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2)]),
        ([3, 3], True, [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2)]),
        ([2], True, [(0, 0), (0, 1)]),
        ([1, 3], False, [(1, 0), (0, 0), (1, 1), (1, 2)]),
    ],
)
def test_the_last_pass_runs_first_and_results_keep_their_order(parts, late, order):
    log: list = []
    assert run_in_turns([work(number, log, count) for number, count in enumerate(parts)], late) == list(range(len(parts)))
    assert log == order and not is_under_way() and get_turn() == 0
    give_turn()  # no effect outside


def test_an_error_ends_both_and_the_next_two_run():
    def fail() -> int:
        give_turn()
        raise ValueError("of one pass")

    log: list = []
    with pytest.raises(ValueError, match="of one pass"):
        run_in_turns([work(0, log), fail], False)
    assert not is_under_way() and run_in_turns([work(0, log), work(1, log)], False) == [0, 1]


def test_each_micro_batch_has_its_own_value_of_an_attribute():
    class Layer:
        scored = PerMicroBatch()

    layer, seen = Layer(), []

    def keep(value: str) -> None:
        layer.scored = value
        give_turn()
        seen.append(layer.scored)
        layer.scored = None

    run_in_turns([lambda: keep("a"), lambda: keep("b")], False)
    assert seen == ["b", "a"] and layer.scored is None


def test_backward_passes_alternate_in_the_opposite_order():
    log: list = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, what):
            ctx.what = what
            log.append(what)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            log.append(ctx.what)
            return gradient * 2, None

    def forward(number: int) -> torch.Tensor:
        x = torch.ones(1, requires_grad=True)
        for part in range(3):
            x = Note.apply(x, (number, part))
            give_turn()
        return x

    first, second = run_in_turns([lambda: forward(0), lambda: forward(1)], True)
    (first + second).backward()
    assert log[6:] == log[5::-1]
