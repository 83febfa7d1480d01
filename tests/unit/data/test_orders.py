"""Epochs, curricula, filters by pass rate and mixtures: the problems of an epoch and their order, exact shares, and exact resumption."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config import Config
from megatron_rl.config.data import DataConfig, TrainDataSourceConfig
from megatron_rl.data import check_data
from megatron_rl.data.orders import DifficultyEpochs, order_by_difficulty, shuffle_epochs
from megatron_rl.data.sets import read_problem_set
from megatron_rl.data.stream import ProblemStream, WeightedInterleaver, mix_orders
from megatron_rl.errors import UserError
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.worker import AsyncRolloutWorker, RolloutWorker
from megatron_rl.types import Generation, Problem, Reward


def problems(rates: list[float | None], name: str = "s") -> list[Problem]:
    return [Problem(f"{name}:{n}", str(n), "", level=n % 3 + 1, source=name, pass_rate=rate) for n, rate in enumerate(rates)]


def settings(**fields: object) -> TrainDataSourceConfig:
    return TrainDataSourceConfig.model_validate({"source": "x.jsonl", "name": "s", **fields})


def epoch(epochs: DifficultyEpochs, start: int, count: int) -> list[int]:
    return [int(epochs.at(start + n).prompt) for n in range(count)]


RATES = [0.0, 0.1, None, 0.5, 0.9, 1.0]


def test_a_filter_by_a_column_keeps_problems_with_unknown_rates():
    epochs = DifficultyEpochs(problems(RATES), settings(pass_rate_low=0.1, pass_rate_high=0.9), "0")
    for number in range(3):
        assert sorted(epoch(epochs, 4 * number, 4)) == [1, 2, 3, 4]
    epochs.observe({"s:3": 1.0})
    assert sorted(epoch(epochs, 12, 4)) == [1, 2, 3, 4], "measured rates do not replace a column"
    assert epochs.left_out == 2


def test_curricula_start_with_the_easiest_problems():
    by_rate = DifficultyEpochs(problems(RATES), settings(curriculum="pass_rate"), "0")
    assert epoch(by_rate, 0, 3) == [5, 4, *({2, 3} & {epoch(by_rate, 2, 1)[0]})]  # 2 is unknown, and counts as 0.5
    assert epoch(by_rate, 4, 2) == [1, 0]
    by_level = DifficultyEpochs(problems([None] * 30), settings(curriculum="level"), "0")
    first, second = ([by_level.at(30 * number + n) for n in range(30)] for number in (0, 1))
    assert [problem.level for problem in first] == [1] * 10 + [2] * 10 + [3] * 10
    assert first != second and sorted(problem.id for problem in first[:10]) == sorted(problem.id for problem in second[:10])


def test_measured_rates_filter_later_epochs_until_a_recheck():
    source = settings(pass_rate="measured", pass_rate_low=0.1, pass_rate_high=0.9, recheck_every=3)
    epochs = DifficultyEpochs(problems([None] * 4), source, "0")
    assert sorted(epoch(epochs, 0, 4)) == [0, 1, 2, 3]
    epochs.observe({"s:0": 0.0, "s:1": 1.0, "s:2": 0.5, "other:3": 0.0})
    assert sorted(epoch(epochs, 4, 2)) == sorted(epoch(epochs, 6, 2)) == [2, 3]
    assert sorted(epoch(epochs, 8, 4)) == [0, 1, 2, 3], "every third epoch contains all"


def test_an_epoch_without_problems_within_the_bounds_contains_all(caplog):
    epochs = DifficultyEpochs(problems([None] * 2), settings(pass_rate="measured", pass_rate_high=0.9), "0")
    epoch(epochs, 0, 2)
    epochs.observe({"s:0": 1.0, "s:1": 1.0})
    assert sorted(epoch(epochs, 2, 2)) == [0, 1]
    assert "no pass rate is within the bounds 0 to 0.9 any more, so epoch 1 contains all problems" in caplog.text


def make_stream() -> ProblemStream:
    measured = settings(pass_rate="measured", pass_rate_low=0.1, pass_rate_high=0.9, curriculum="pass_rate", recheck_every=4)
    orders = [
        order_by_difficulty(problems([None] * 7), measured, "0/s"),
        order_by_difficulty(problems([None] * 5, "levels"), settings(name="levels", curriculum="level"), "0/levels"),
        shuffle_epochs(problems([None] * 4, "plain"), "0/plain"),
    ]
    return mix_orders(orders, [3.0, 1.0, 0.5])


class Run:
    """Real workers, an engine that generates one token, and random rewards that depend on the problem."""

    def __init__(self, staleness: int, rounds: int, steps: int, state: dict | None = None) -> None:
        sections = {"placement": {"kind": "disaggregated", "max_staleness": staleness}, "model": {"path": "m"}}
        rollout, algorithm = {"prompts_per_step": 5, "group_size": 2}, {"correction": "tis", "dynamic_sampling_max_rounds": rounds}
        config = Config.model_validate({**sections, "rollout": rollout, "algorithm": algorithm}, strict=False)
        stream = make_stream()
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        self.version = 0
        tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [int(text)], decode=lambda ids, skip_special_tokens: "")
        worker = RolloutWorker(config, MultiTurnSampler(self, tokenizer), stream, [], self)  # type: ignore[arg-type]
        self.worker = AsyncRolloutWorker(worker, staleness, steps, lambda: None)

    def generate(self, prompts_B, samplings, abort=None):
        return [Generation(np.array([97]), np.array([-1.0]), "stop", self.version) for _ in prompts_B]

    def score(self, texts, problems, lengths, broken):
        rng = random.Random(problems[0].id)
        return [Reward(float(correct), correct) for correct in (rng.random() < 0.5 for _ in problems)]

    def step(self, version: int) -> list[str]:
        self.version = version
        rollout = self.worker.collect(version)
        return [member.problem.id for member in [*rollout.completions_B, *rollout.discarded_B]]


@given(st.sampled_from([(0, 0), (0, 3), (1, 0), (3, 0)]), st.sets(st.integers(1, 11)))
def test_a_resumed_run_draws_the_same_problems(how, kills):
    """`how`: (max_staleness, rounds of dynamic sampling)."""
    whole = Run(*how, 12)
    expected = [whole.step(version) for version in range(12)]
    whole.worker.close()
    run, drawn = Run(*how, 12), list[list[str]]()
    for version in range(12):
        if version in kills:  # the step after the snapshot is lost
            make_state = run.worker.snapshot()
            run.step(version)
            run.worker.close()
            run = Run(*how, 12, make_state())
        drawn.append(run.step(version))
    run.worker.close()
    assert drawn == expected


def test_measured_rates_change_the_problems_drawn():
    """Otherwise the test above would prove nothing."""
    run = Run(0, 0, 20)
    drawn = [name for version in range(20) for name in run.step(version)]
    run.worker.close()
    counts = {name: drawn.count(name) for name in drawn if name.startswith("s:")}
    assert max(counts.values()) > 2 * min(counts.values())


def test_the_state_of_a_large_set_is_small():
    stream = mix_orders([order_by_difficulty(problems([None] * 10_000), settings(pass_rate="measured", pass_rate_high=0.9), "0")], [1.0])
    stream.next_batch(35_000)
    assert len(json.dumps(stream.state_dict())) < 12 * 10_000


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"pass_rate_low": 0.9, "pass_rate_high": 0.1}, r"pass_rate_low \(0.9\) must be less than pass_rate_high \(0.1\)"),
        ({"pass_rate": "measured"}, "the measured pass rate is not used"),
        ({"pass_rate_low": 0.1, "recheck_every": 2}, "recheck_every only applies to a filter by measured pass rates"),
    ],
)
def test_settings_without_effect_are_refused(fields, line):
    with pytest.raises(ValidationError, match=line):
        settings(**fields)


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"curriculum": "level"}, "has a curriculum by level, but all of its problems have level 0; set columns.level, or cur"),
        ({"curriculum": "pass_rate"}, 'uses pass rates, but no row has one; set columns.pass_rate, or pass_rate = "measured"'),
        ({"pass_rate_high": 0.1, "columns": "rate"}, "has no problem with a pass rate from 0 to 0.1; widen the bounds"),
        ({"pass_rate_high": 0.5, "columns": "text"}, "the field text must be a number from 0 to 1, or null, not 'x'; "),
        ({"source": "examples.arithmetic.task:Arithmetic", "curriculum": "level"}, "generates problems without end, so it has no epochs"),
    ],
)
def test_data_that_do_not_match_the_settings_are_refused(tmp_path, write, fields, line):
    columns = {"question": "q", "answer": "a", "pass_rate": fields.pop("columns", "")}
    train = {"source": write({"q": "1?", "a": "1", "rate": 0.5, "text": "x"}), "columns": columns, **fields}
    if ":" in train["source"]:
        del train["columns"]
    with pytest.raises(UserError, match=line):
        check_data(DataConfig.model_validate({"train": [train]}), tmp_path)


def test_a_column_of_pass_rates_is_read(write):
    source = write(*({"q": f"{n}?", "a": "1", "rate": rate} for n, rate in enumerate((0, 0.25, None))))
    data = DataConfig.model_validate({"train": [{"source": source, "columns": {"question": "q", "answer": "a", "pass_rate": "rate"}}]})
    assert [problem.pass_rate for problem in read_problem_set(data.train[0], data, "data.train")] == [0.0, 0.25, None]


WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def numbered(size: int, name: str = "") -> list[Problem]:
    return [Problem(f"{name}{i}", f"q{i}", str(i)) for i in range(size)]


def mixed(sizes: list[int], weights: list[float], seed: int = 0) -> ProblemStream:
    return mix_orders([shuffle_epochs(numbered(size, f"{index}:"), f"{seed}/{index}") for index, size in enumerate(sizes)], weights)


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 100))
def test_every_epoch_contains_every_problem_once(size, batch, seed):
    stream = mix_orders([shuffle_epochs(numbered(size), seed)], [1.0])
    drawn = [problem for _ in range(-(-3 * size // batch)) for problem in stream.next_batch(batch)]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size], key=numbered(size).index) == numbered(size)


@given(WEIGHTS, st.integers(1, 400))
def test_every_set_is_within_one_problem_of_its_share_at_any_time(weights, positions):
    turns, counts = WeightedInterleaver(weights), Counter()
    for position in range(positions):
        index, before = turns.locate(position)
        assert before == counts[index]  # each set has no gap in its own order
        counts[index] += 1
        for other, weight in enumerate(weights):
            assert abs(counts[other] - (position + 1) * weight / sum(weights)) < 1 + 1e-9


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
    order = shuffle_epochs(numbered(50), 0)
    assert [order.at(n) for n in range(50)] != [order.at(n) for n in range(50, 100)]


def test_another_mixture_has_another_fingerprint():
    mixtures = [
        mixed([5, 4], [2.0, 1.0]), mixed([5, 4], [1.0, 2.0]), mixed([4, 5], [2.0, 1.0]), mixed([5, 4], [2.0, 1.0], seed=1),
        mixed([5], [2.0]),
    ]  # fmt: skip
    assert len({stream.state_dict()["fingerprint"] for stream in mixtures}) == len(mixtures)
    assert mixed([5, 4], [2.0, 1.0]).state_dict() == mixtures[0].state_dict()
