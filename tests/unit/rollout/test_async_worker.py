"""Generation ahead of training: who may begin when, what a stopped run keeps, and what is said of stale tokens."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.errors import EngineLostError, RunError, UserError
from megatron_rl.preflight import Facts, Needs, check
from megatron_rl.rollout import async_worker
from megatron_rl.rollout.async_worker import AsyncRolloutWorker
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.worker import RolloutBatch, compute_rollout_metrics
from megatron_rl.training.mismatch import bin_mismatch, measure_mismatch, measure_staleness
from megatron_rl.training.samples import to_training_samples
from megatron_rl.types import Completion, Generation, Problem, SamplingParams
from rollout_sglang.engine import parse_generation


class Worker:
    """Its groups tell for which version they are, and at which the trainer stood when they began."""

    def __init__(self) -> None:
        self.trainer, self.position, self.broken, self.hold = 0, 0, -1, threading.Event()
        self.hold.set()
        self.error = RunError("the engine is gone")

    def collect(self, version: int) -> RolloutBatch:
        began = self.trainer
        assert self.hold.wait(60)
        if version == self.broken:
            raise self.error
        self.position += 1
        seconds = {"ahead/generate": 2.0, "ahead/reward": 1.0}
        return RolloutBatch([SimpleNamespace(version=version, began=began)], seconds, [], {"sampling/rounds": 1})

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}


@pytest.fixture
def thread(monkeypatch):
    """The only thread of the workers that a test makes."""
    pool = ThreadPoolExecutor(1)
    monkeypatch.setattr(async_worker, "ThreadPoolExecutor", lambda *_, **__: pool)
    return pool


def run(worker: Worker, max_staleness: int, steps: int, start: int = 0) -> list[SimpleNamespace]:
    ahead = AsyncRolloutWorker(worker, max_staleness, steps, lambda: None)
    worker.position, results = start, []
    for version in range(start, steps):
        worker.trainer = version
        results += ahead.collect(version).completions_B
        assert ahead.state_dict() == {"position": version + 1}
    ahead.close()
    return results


@given(st.integers(0, 4), st.integers(0, 3), st.integers(1, 8))
def test_nothing_begins_before_the_trainer_is_near_enough(max_staleness, start, more):
    worker = Worker()
    results = run(worker, max_staleness, start + more, start)
    assert [group.version for group in results] == list(range(start, start + more)) and worker.position == start + more
    assert all(0 <= group.version - group.began <= max_staleness for group in results)


def test_the_next_groups_are_made_while_the_trainer_trains(thread):
    worker = Worker()
    ahead = AsyncRolloutWorker(worker, 1, 9, lambda: None)
    ahead.collect(0)
    thread.submit(lambda: None).result(60)  # after all that has begun
    assert worker.position == 2 and ahead.state_dict() == {"position": 1}, "a run that goes on makes them anew"
    ahead.collect(1)
    ahead.close()


def test_groups_of_a_lost_engine_are_made_anew_and_no_problem_is_skipped(thread):
    """Lost in the groups for version 1: those for 2 had begun behind them."""
    failing, worker = Worker(), Worker()
    failing.broken = worker.broken = 1
    ahead = AsyncRolloutWorker(failing, 1, 9, lambda: None)
    ahead.collect(0)
    with pytest.raises(RunError, match="the engine is gone"):  # any other error is raised in its turn
        ahead.collect(1)
    worker.error = EngineLostError("the engine is gone")
    ahead = AsyncRolloutWorker(worker, 2, 9, lambda: None)
    ahead.collect(0)
    thread.submit(lambda: None).result(60)
    assert worker.position == 1, "nothing comes before the groups that failed"
    worker.broken = 2
    assert ahead.collect(1).completions_B[0].version == 1, "a sync has brought the engine back since"
    with pytest.raises(EngineLostError, match="the engine is gone"):
        ahead.collect(2)
    assert ahead.state_dict() == {"position": 2}
    worker.broken = -1
    assert [ahead.collect(version).completions_B[0].version for version in (2, 3, 4)] == [2, 3, 4]
    assert ahead.state_dict() == {"position": 5}
    ahead.close()


def test_closing_breaks_off_what_is_made(thread):
    worker, stopped = Worker(), []
    ahead = AsyncRolloutWorker(worker, 2, 9, lambda: (stopped.append(True), worker.hold.set()))
    ahead.collect(0)
    worker.hold.clear()
    thread.submit(worker.hold.wait, 60)
    ahead.close()
    assert stopped == [True]
    with pytest.raises(RuntimeError, match="after shutdown"):
        thread.submit(print)


def test_the_trainer_says_what_it_waited_and_not_what_generation_took():
    ahead = AsyncRolloutWorker(Worker(), 1, 1, lambda: None)
    rollout = ahead.collect(0)
    ahead.close()
    assert rollout.seconds == {"time/generate": pytest.approx(0, abs=1), "ahead/generate": 2.0, "ahead/reward": 1.0}
    assert rollout.sampling == {"sampling/rounds": 1}
    rollout.completions_B = [Completion(Problem("0", "", ""), [1], [2] * 6, [-1.0] * 6, "stop", 0, "")]
    assert compute_rollout_metrics(rollout)["tokens/per_second"] == 3


class Engine:
    """One answer of two tokens for every prompt, by the versions that are told."""

    def __init__(self, *versions: int) -> None:
        self.versions = list(versions)

    def generate(self, prompts_B, samplings):
        return [
            Generation(np.array([97, 98]), np.array([-1.0, -2.0]), "stop", self.versions[-1], np.array(self.versions)) for _ in prompts_B
        ]


def answer(engine: Engine, version: int, staleness: int) -> Completion:
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [65], decode=lambda ids, skip_special_tokens: "")
    return MultiTurnSampler(engine, tokenizer).sample([Problem("0", "A", "")], [SamplingParams(1.0, 9)], version, staleness)[0]  # type: ignore[arg-type]


def test_tokens_within_the_bound_are_taken_with_their_versions_and_others_break_the_run():
    completion = answer(Engine(4, 5), 6, 2)
    assert (completion.version_lags_T.tolist(), completion.policy_version) == ([2, 1], 5)
    (sequence,) = to_training_samples(RolloutBatch([completion]))
    assert sequence.version_lags.tolist() == [2, 1]
    for versions, wrong in (((3, 5), 3), ((6, 7), 7)):
        with pytest.raises(RunError, match=f"policy version {wrong}, the trainer holds version 6 and takes 4 and newer"):
            answer(Engine(*versions), 6, 2)


def sampled(ages: list[int], difference: list[float]) -> TrainingSample:
    old, lags = torch.full((len(ages),), -2.0), torch.tensor(ages)
    return TrainingSample([1], [2] * len(ages), old_logprobs=old, rollout_logprobs=old - torch.tensor(difference), version_lags=lags)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-3)  # differences of float32 log-probs


def test_stale_tokens_do_not_count_as_mismatch():
    sequences = [sampled([1, 1, 0], [0.5, -0.3, 0.001]), sampled([0], [-0.003])]
    mismatch = measure_mismatch(sequences)
    assert mismatch["mismatch/abs_mean"] == close(0.002) and mismatch["mismatch/abs_max"] == close(0.003)
    stale = measure_staleness(sequences)
    assert [stale[f"staleness/{name}"] for name in ("mean", "max", "share", "mixed")] == [0.5, 1, 0.5, 0.5]
    assert stale["staleness/abs_mean"] == close(0.4)
    assert measure_mismatch([*sequences[:1], sampled([2], [1.0])])["mismatch/abs_max"] == close(0.001)
    assert measure_mismatch([sampled([1], [1.0])]) == {}, "what was not measured is not told"
    assert "staleness/abs_mean" not in measure_staleness([sampled([0], [1.0])])


def test_mismatch_by_position_counts_the_tokens_that_answers_have_there():
    """The second answer is short; the third's first token is an environment's, its second is stale."""
    long, short = sampled([0] * 70, [0.01] * 32 + [0.02] * 32 + [0.04] * 6), sampled([0] * 3, [-0.03] * 3)
    mixed = sampled([1, 0], [9.0, 0.05])
    mixed.response_ids, mixed.response_mask = torch.tensor([2] * 3), torch.tensor([False, True, True])
    metrics = measure_mismatch([long, short, mixed], by_position=True)
    by_bin = {
        start: (metrics[f"mismatch/position/{start}/tokens"], metrics[f"mismatch/position/{start}/abs_mean"]) for start in (0, 32, 64)
    }
    assert by_bin == {0: (36, close((0.32 + 0.09 + 0.05) / 36)), 32: (32, close(0.02)), 64: (6, close(0.04))} and len(metrics) == 3 + 6
    assert bin_mismatch(long) == [(32, close(0.01)), (32, close(0.02)), (6, close(0.04))]
    assert bin_mismatch(mixed) == [(1, close(0.05))] and bin_mismatch(sampled([], [])) == []


def response(spans: list[tuple[str, int, int]], tokens: int) -> dict:
    meta = {
        "weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in spans],
        "weight_version": spans[-1][0],
        "cached_tokens": 0,
        "output_token_logprobs": [[-0.5, 10 + number, None] for number in range(tokens)],
        "finish_reason": {"type": "stop"},
    }
    return {"meta_info": meta}


def test_the_engine_tells_every_tokens_version():
    assert parse_generation(response([("3", 0, 4)], 4), True).versions_T is None
    results = parse_generation(response([("3", 0, 1), ("4", 1, 4)], 4), True)
    assert (results.versions_T.tolist(), results.policy_version, results.output_ids_T.tolist()) == ([3, 4, 4, 4], 4, [10, 11, 12, 13])
    with pytest.raises(RunError, match="policy versions of 3 tokens in a completion of 4"):
        parse_generation(response([("3", 0, 1), ("4", 1, 3)], 4), True)
    with pytest.raises(RunError, match="one completion was sampled by policy versions 3, 4"):
        parse_generation(response([("3", 0, 1), ("4", 1, 4)], 4), False)


def config(**sections: dict) -> Config:
    return Config.model_validate({"model": {"path": "m"}, **sections}, strict=False)


ASYNC = {"kind": "disaggregated", "max_staleness": 1}


@pytest.mark.parametrize(
    "sections, line",
    [
        ({}, r'placement.max_staleness = 1: .*nothing corrects .*algorithm.correction = "tis"'),
        ({"algorithm": {"correction": "tis"}, "log": {"attribute_every": 2}}, "log.attribute_every = 2: "),
        ({"algorithm": {"correction": "tis", "routing_replay": "engine"}, "sync": {"running": "continue"}}, "algorithm.routing_replay = "),
    ],
)
def test_stale_tokens_need_a_correction_and_have_no_single_cause(sections, line):
    with pytest.raises(UserError, match=line):
        check(Facts(config(placement=ASYNC, **sections)), Needs.TRAINER)
    for algorithm in ({"correction": "tis"}, {"old_policy": "engine"}):
        check(Facts(config(placement=ASYNC, algorithm=algorithm)), Needs.TRAINER)  # with one they may be trained on
    check(Facts(config(log={"attribute_every": 2})), Needs.TRAINER)
    with pytest.raises(ValueError, match='set kind "disaggregated"'):  # who takes turns cannot run ahead
        config(placement={"max_staleness": 1})
