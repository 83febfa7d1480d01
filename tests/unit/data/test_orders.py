"""Filters by pass rate and curricula: the problems of an epoch and their order, and exact resumption of a stopped run."""

from __future__ import annotations

import json
import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config import Config
from megatron_rl.config.data import DataConfig, TrainDataSourceConfig
from megatron_rl.data import check_data
from megatron_rl.data.orders import DifficultyEpochs, order_by_difficulty, shuffle_epochs
from megatron_rl.data.sets import read_set
from megatron_rl.data.stream import ProblemStream, mix_orders
from megatron_rl.errors import UserError
from megatron_rl.rewards.thinking import Response
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
    """Return a stream of a set with measured pass rates, a set with a curriculum by level, and a shuffled set."""
    measured = settings(pass_rate="measured", pass_rate_low=0.1, pass_rate_high=0.9, curriculum="pass_rate", recheck_every=4)
    orders = [
        order_by_difficulty(problems([None] * 7), measured, "0/s", ["s"]),
        order_by_difficulty(problems([None] * 5, "levels"), settings(name="levels", curriculum="level"), "0/levels", ["levels"]),
        shuffle_epochs(problems([None] * 4, "plain"), "0/plain", ["plain"]),
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
        encode = lambda text, add_special_tokens: [int(text)]  # noqa: E731
        tokenizer = mock.Mock(encode=encode, decode=lambda ids, skip_special_tokens: "", chat_template=None, added_tokens_decoder={})
        worker = RolloutWorker(config, MultiTurnSampler(self, tokenizer), stream, [], self)  # type: ignore[arg-type]
        self.worker = AsyncRolloutWorker(worker, staleness, steps, lambda: None)

    def generate(self, prompts_B, samplings, abort=None):
        return [Generation(np.array([97]), np.array([-1.0]), "stop", self.version) for _ in prompts_B]

    def split(self, text, problem):
        return Response(text, "")

    def score(self, texts, problems, lengths, broken, *_):
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
    stream = mix_orders(
        [order_by_difficulty(problems([None] * 10_000), settings(pass_rate="measured", pass_rate_high=0.9), "0", ["s"])], [1.0]
    )
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
def test_data_that_do_not_match_the_settings_are_refused(model, write, fields, line):
    columns = {"question": "q", "answer": "a", "pass_rate": fields.pop("columns", "")}
    train = {"source": write({"q": "1?", "a": "1", "rate": 0.5, "text": "x"}), "columns": columns, **fields}
    if ":" in train["source"]:
        del train["columns"]
    with pytest.raises(UserError, match=line):
        check_data(DataConfig.model_validate({"train": [train]}), model)


def test_a_column_of_pass_rates_is_read(write):
    source = write(*({"q": f"{n}?", "a": "1", "rate": rate} for n, rate in enumerate((0, 0.25, None))))
    data = DataConfig.model_validate({"train": [{"source": source, "columns": {"question": "q", "answer": "a", "pass_rate": "rate"}}]})
    assert [problem.pass_rate for problem in read_set(data.train[0], data, "data.train").problems] == [0.0, 0.25, None]
