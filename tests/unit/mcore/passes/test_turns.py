"""Whose turn it is, and in which order autograd runs what two micro-batches left."""

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
    "late, order",
    [
        (False, [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2)]),
        (True, [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2)]),
    ],
)
def test_the_last_runs_first_and_results_keep_their_order(late, order):
    log: list = []
    assert run_in_turns([work(0, log), work(1, log)], late) == [0, 1] and log == order
    assert not is_under_way() and get_turn() == 0


def test_one_goes_on_alone_and_outside_nobody_gives_a_turn():
    log: list = []
    assert run_in_turns([work(0, log, 2)], True) == [0] and log == [(0, 0), (0, 1)]
    log = []
    assert run_in_turns([work(0, log, 1), work(1, log, 3)], False) == [0, 1]
    assert log == [(1, 0), (0, 0), (1, 1), (1, 2)]
    give_turn()


def test_an_error_ends_both_and_the_next_two_run():
    def fail() -> int:
        give_turn()
        raise ValueError("of one")

    log: list = []
    with pytest.raises(ValueError, match="of one"):
        run_in_turns([work(0, log), fail], False)
    assert not is_under_way() and run_in_turns([work(0, log), work(1, log)], False) == [0, 1]


def test_each_has_its_own_value_of_an_attribute():
    class Layer:
        scored = PerMicroBatch()

    layer, seen = Layer(), []

    def run(value: str):
        def keep() -> None:
            layer.scored = value
            give_turn()
            seen.append(layer.scored)
            layer.scored = None

        return keep

    run_in_turns([run("a"), run("b")], False)
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

    def run(number: int):
        def forward() -> torch.Tensor:
            x = torch.ones(1, requires_grad=True)
            for part in range(3):
                x = Note.apply(x, (number, part))
                give_turn()
            return x

        return forward

    first, second = run_in_turns([run(0), run(1)], True)
    (first + second).backward()
    assert log[6:] == log[5::-1]
