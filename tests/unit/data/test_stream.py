"""Shuffled epochs and mixtures: complete epochs, exact shares in every batch, and resumption from a position."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.orders import shuffle_epochs
from megatron_rl.data.stream import ProblemStream, WeightedInterleaver, mix_orders
from megatron_rl.types import Problem

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def problems(size: int, name: str = "") -> list[Problem]:
    return [Problem(f"{name}{i}", f"q{i}", str(i)) for i in range(size)]


def mixed(sizes: list[int], weights: list[float], seed: int = 0) -> ProblemStream:
    return mix_orders([shuffle_epochs(problems(size, f"{index}:"), f"{seed}/{index}") for index, size in enumerate(sizes)], weights)


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 100))
def test_every_epoch_contains_every_problem_once(size, batch, seed):
    stream = mix_orders([shuffle_epochs(problems(size), seed)], [1.0])
    drawn = [problem for _ in range(-(-3 * size // batch)) for problem in stream.next_batch(batch)]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size], key=problems(size).index) == problems(size)


@given(WEIGHTS, st.integers(1, 400))
def test_every_set_is_within_one_problem_of_its_share_at_any_time(weights, positions):
    turns, counts = WeightedInterleaver(weights), Counter()
    for position in range(positions):
        index, before = turns.locate(position)
        assert before == counts[index]  # each set has no gap in its own order
        counts[index] += 1
        for other, weight in enumerate(weights):
            assert abs(counts[other] - (position + 1) * weight / sum(weights)) < 1 + 1e-9


def test_shares_converge_to_the_weights():
    drawn = mixed([7, 50, 3], [3.0, 1.0, 0.5]).next_batch(9000)
    shares = Counter(problem.id.split(":")[0] for problem in drawn)
    assert shares == {"0": 6000, "1": 2000, "2": 1000}
    assert Counter(Counter(problem.id for problem in drawn if problem.id[0] == "1").values()) == {40: 50}  # each set has its own epochs


@given(WEIGHTS, st.integers(0, 200), st.integers(0, 30), st.integers(1, 30))
def test_a_mixture_resumes_exactly_at_any_position(weights, position, more, batch):
    sizes = [3 + 2 * index for index in range(len(weights))]
    stream = mixed(sizes, weights)
    stream.next_batch(position)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = stream.next_batch(batch)
    fresh = mixed(sizes, weights)
    fresh.next_batch(more)  # its earlier position, ahead or behind, does not matter
    fresh.load_state_dict(state)
    assert fresh.next_batch(batch) == expected


def test_batches_do_not_change_the_order_and_epochs_are_shuffled_differently():
    whole, parts = mixed([5, 4], [2.0, 1.0]), mixed([5, 4], [2.0, 1.0])
    assert whole.next_batch(60) == [problem for size in (1, 9, 20, 30) for problem in parts.next_batch(size)]
    order = shuffle_epochs(problems(50), 0)
    assert [order.at(n) for n in range(50)] != [order.at(n) for n in range(50, 100)]


def test_another_mixture_has_another_fingerprint():
    mixtures = [
        mixed([5, 4], [2.0, 1.0]), mixed([5, 4], [1.0, 2.0]), mixed([4, 5], [2.0, 1.0]), mixed([5, 4], [2.0, 1.0], seed=1),
        mixed([5], [2.0]),
    ]  # fmt: skip
    assert len({stream.state_dict()["fingerprint"] for stream in mixtures}) == len(mixtures)
    assert mixed([5, 4], [2.0, 1.0]).state_dict() == mixtures[0].state_dict()
