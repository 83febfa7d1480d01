"""Asynchronous rollouts: when steps begin, what a stopped run keeps, and how stale tokens are reported."""

import json
import math
import threading
import time
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import until

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.data import ProblemOrder, ProblemStream
from megatron_rl.diagnosis.mismatch import bin_mismatch, measure_mismatch, measure_staleness
from megatron_rl.errors import AbortedError, EngineLostError, RunError
from megatron_rl.preflight import Facts, Needs, check
from megatron_rl.rewards.thinking import Response
from megatron_rl.rollout.engine import Abort
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.rollout.metrics import build_sample_rows, compute_rollout_metrics
from megatron_rl.rollout.worker import AsyncRolloutWorker, RolloutWorker
from megatron_rl.training.samples import to_training_samples
from megatron_rl.types import Completion, Generation, Problem, RemoteColumns, Reward, SamplingParams, Scored


class Lengths:
    """An engine whose clock is the trainer's version. A completion has tokens of the versions at which its group began and ended.

    One problem in ten takes long: it ends when the trainer waits for it, or after `patience` seconds. `fails`: how many of the next
    requests find no engine.
    """

    def __init__(self) -> None:
        self.version, self.fails, self.ended, self.aborted = 0, 0, list[int](), list[int]()
        self.patience = math.inf
        self.keeps: set[str] | None = None  # handles of kept columns, or None if columns come with the answers
        self.keeps_texts, self.losses = False, 0  # `losses`: how many of the next requests to score fail
        self.scored, self.read = list[str](), list[str]()
        self.slow = threading.Event()
        self.lock = threading.Lock()

    def generate(self, prompts_B, samplings, abort=None):
        with self.lock:
            began, self.fails = self.version, self.fails - 1
            if self.fails >= 0:
                raise EngineLostError("the engine is gone")
        number, aborted = int(prompts_B[0][0]), threading.Event()
        with (abort or Abort()).calling(aborted.set):
            if number % 10 == 0:
                deadline = time.monotonic() + self.patience
                until(lambda: self.slow.is_set() or aborted.is_set() or time.monotonic() > deadline, 60, "the trainer")
        if aborted.is_set():
            with self.lock:
                self.aborted.append(number)
            raise AbortedError
        with self.lock:
            self.ended.append(number)
            versions = np.array([began, self.version])
            if self.keeps is not None:
                handles = [f"{number}/{len(self.ended)}/{member}" for member in range(len(prompts_B))]
                self.keeps.update(handles)
                told = (began, self.version), None, 1, self.keeps_texts
                columns = [RemoteColumns("", "", handle, 2, handle, -3.0, *told) for handle in handles]
                return [Generation(versions[:0], versions[:0], "stop", self.version, remote=each, text="") for each in columns]
        return [Generation(np.array([97, 98]), np.array([-1.0, -2.0]), "stop", versions[1], versions) for _ in prompts_B]

    def score(self, columns_B, problems_B):
        with self.lock:
            self.losses -= 1
            if self.losses >= 0:
                self.keeps -= {columns.handle for columns in columns_B}
                raise EngineLostError("the engine is gone with its columns")
            self.scored.append(problems_B[0].id)
        return [Scored(Reward(float(member % 2), False), 0.25, member == 3) for member in range(len(columns_B))]

    def read_texts(self, columns_B):
        self.read += [columns.handle for columns in columns_B]
        handles = [columns.handle for columns in columns_B]
        return [(handle, Response(None if handle.endswith("/3") else "answer", "thought")) for handle in handles]

    def find_columns(self, by_engine):
        return {columns.handle for own in by_engine.values() for columns in own} & self.keeps


def tokenizer_of(encode):
    return mock.Mock(encode=encode, decode=lambda ids, skip_special_tokens: "", chat_template=None, added_tokens_decoder={})


class Run:
    """A trainer of groups of two problems with four completions each, in a run that may lose its engine or be stopped."""

    def __init__(self, max_staleness: int, steps: int, rounds: int = 0, state: dict | None = None, **rollout: object) -> None:
        sections = {"placement": {"kind": "disaggregated", "max_staleness": max_staleness}, "algorithm": {}}
        sections["log"] = {"samples": 3}
        sections["algorithm"] = {"correction": "tis", "dynamic_sampling_max_rounds": rounds}
        changed = config(rollout={"prompts_per_step": 2, "group_size": 4, **rollout}, **sections)
        stream = ProblemStream(ProblemOrder(lambda position: Problem(str(position), str(position), ""), "numbers"))
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        self.engine = Lengths()
        tokenizer = tokenizer_of(lambda text, add_special_tokens: [int(text)])
        self.scored: list[str] = []
        sampler = MultiTurnSampler(self.engine, tokenizer)  # type: ignore[arg-type]
        worker = RolloutWorker(changed, sampler, stream, [], self, engines=self.engine)  # type: ignore[arg-type]
        self.ahead = AsyncRolloutWorker(worker, max_staleness, steps, self.engine.slow.set)
        self.trained: list[list[str]] = []
        self.sampling: list[dict[str, float]] = []
        self.ages: list[int] = []

    def split(self, text, problem):
        return Response(text, "")

    def settle(self, rewards, problems):
        return rewards

    def score(self, texts, problems, lengths, broken, *_):
        """Give every third problem equal rewards."""
        self.scored.append(problems[0].id)
        return [Reward(float(member % 2 and int(problems[0].id) % 3 > 0), False) for member in range(len(problems))]

    def step(self, version: int, waits: bool = True) -> int:
        """Train at `version`. Return how often the engine was lost meanwhile. `waits`: whether to wait for long completions."""
        losses = 0
        with self.engine.lock:
            self.engine.version = version
        self.ahead.begin(version)
        if waits:
            self.engine.slow.set()
        while True:
            try:
                rollout = self.ahead.collect(version)
                break
            except EngineLostError:
                losses += 1
        self.engine.slow.clear()
        members = [*rollout.completions_B, *rollout.discarded_B]
        self.sampling.append(rollout.sampling)
        self.trained.append([member.problem.id for member in members[::4]])
        self.ages += [int(lag) for member in members for lag in (() if member.version_lags_T is None else member.version_lags_T)]
        return losses


@given(st.integers(0, 4), st.integers(1, 8), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_groups_are_trained_once_in_the_order_they_were_drawn_despite_lengths_and_lost_engines(max_staleness, steps, fails):
    """One problem in ten takes until the trainer waits for it. Other problems end earlier and do not overtake it."""
    run = Run(max_staleness, steps)
    for version in range(steps):
        with run.engine.lock:
            run.engine.fails = fails[version]
        run.step(version)
        assert run.ahead.snapshot()() == {"position": 2 * (version + 1), "fingerprint": "numbers"}
    run.ahead.close()
    assert run.trained == [[str(2 * version), str(2 * version + 1)] for version in range(steps)]
    assert max(run.ages, default=0) <= max_staleness
    assert sorted(map(int, run.scored)) == sorted(run.engine.ended) == list(range(2 * steps)), "what had ended is not sampled again"


@given(st.integers(0, 3), st.integers(1, 6), st.integers(1, 6))
def test_a_resumed_run_trains_exactly_on_the_problems_that_the_first_run_left(max_staleness, first, second):
    """Dynamic sampling draws the problems of its later rounds after those of the next steps."""
    run = Run(max_staleness, first + second, rounds=4)
    for version in range(first):
        run.step(version)
    state = run.ahead.snapshot()()
    run.ahead.close()
    again = Run(max_staleness, first + second, rounds=4, state=state)
    for version in range(first, first + second):
        again.step(version)
    state = again.ahead.snapshot()()
    again.ahead.close()
    trained = [int(number) for step in [*run.trained, *again.trained] for number in step]
    assert sorted([*trained, *state.get("left_out", ())]) == list(range(state["position"]))


@settings(max_examples=25)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 8), st.integers(0, 8))
def test_over_sampling_trains_once_on_every_problem_and_aborts_none_twice(max_staleness, extra, first, second):
    """After a resume, aborted problems come first."""
    run = Run(max_staleness, first + second, over_sampling_prompts=extra)
    run.engine.patience = 0.02
    for version in range(first):
        run.step(version, waits=False)
    state = run.ahead.snapshot()()
    run.ahead.close()
    again = Run(max_staleness, first + second, state=state, over_sampling_prompts=extra)
    again.engine.patience = 0.02
    for version in range(first, first + second):
        again.step(version, waits=False)
    left = again.ahead.snapshot()()
    again.ahead.close()
    steps = [*run.trained, *again.trained]
    trained = [int(number) for step in steps for number in step]
    assert all(len(step) == 2 for step in steps)
    assert sorted([*trained, *left.get("left_out", ())]) == list(range(left["position"]))
    assert max([*run.ages, *again.ages], default=0) <= max_staleness
    for each in (run, again):
        assert max(Counter(each.engine.aborted).values(), default=0) <= 1


def test_over_sampling_does_not_wait_for_the_slowest_until_it_was_aborted_once():
    run = Run(0, 2, over_sampling_prompts=1)
    run.step(0, waits=False)
    assert run.trained == [["1", "2"]] and run.engine.aborted == [0]
    run.engine.version = 1
    run.ahead.begin(1)
    until(lambda: {3, 4} <= {*run.engine.ended}, 60, "the others")
    run.step(1)
    run.ahead.close()
    assert run.trained[1][0] == "0" and run.engine.aborted == [0]
    assert run.sampling == [{"sampling/aborted": 1.0}] * 2


def test_answers_are_scored_and_the_next_groups_run_while_the_longest_answer_does():
    run = Run(0, 1)
    run.ahead.begin(0)  # problem 0 takes long, problem 1 does not
    until(lambda: run.scored == ["1"], 60, "what was begun")
    run.step(0)
    run.ahead.close()
    assert run.scored == ["1", "0"] and run.trained == [["0", "1"]]
    run = Run(2, 9)
    run.ahead.begin(0)
    until(lambda: sorted(run.engine.ended) == [1, 2, 3, 4, 5], 60, "what was begun")
    run.step(0)
    assert run.trained == [["0", "1"]] and run.ahead.snapshot()()["position"] == 2, "a run that goes on makes the others anew"
    run.ahead.close()


def test_groups_wait_for_room_in_the_engines():
    run = Run(1, 5, engines=1, max_running_requests=4)  # of one group, and one that stands by
    run.ahead.begin(0)
    until(lambda: sorted(run.engine.ended) == [1, 2, 3], 60, "what was begun")  # two steps begin at once, in either order
    run.step(0)
    run.ahead.close()
    assert len(run.engine.ended) == 4 and run.engine.ended[-1] == 0


def test_other_errors_of_the_engine_end_the_run_in_their_turn():
    run = Run(1, 5)
    run.step(0)
    until(lambda: len(run.engine.ended) == 4, 60, "the groups of step 1")
    run.engine.version = 7
    run.ahead.begin(1)
    run.engine.slow.set()
    run.ahead.collect(1)
    with pytest.raises(RunError, match="sampled by policy version 7, the trainer holds version 2"):
        run.ahead.collect(2)
    run.ahead.close()


def test_a_loss_while_nobody_waits_is_made_good_by_the_next_sync():
    run = Run(1, 3)
    run.engine.fails = 4
    run.ahead.begin(0)
    until(lambda: run.engine.fails <= 0, 60, "what was begun")
    until(lambda: all(step.rollout.done() for step in run.ahead._pending), 60, "what was begun")
    assert run.step(0) == 0, "begun anew, without a second recovery"
    run.ahead.close()


def test_the_trainer_reports_how_long_it_waited_and_not_how_long_generation_took():
    run = Run(0, 1, rounds=1)
    run.engine.slow.set()
    rollout = run.ahead.collect(0)
    run.ahead.close()
    assert rollout.seconds.keys() == {"time/generate", "ahead/generate", "ahead/reward"} and min(rollout.seconds.values()) >= 0
    assert rollout.sampling["sampling/rounds"] == 1
    rollout.seconds["ahead/generate"] = 2.0
    assert compute_rollout_metrics(rollout)["tokens/per_second"] == 8


def test_groups_whose_columns_went_with_an_engine_are_sampled_again():
    run = Run(1, 3)
    run.engine.keeps = set()
    run.step(0)
    until(lambda: len(run.engine.ended) >= 4, 60, "the next step")
    run.engine.keeps.remove(next(handle for handle in run.engine.keeps if handle.startswith("3/")))
    run.step(1)
    run.ahead.close()
    assert run.trained == [["0", "1"], ["2", "3"]] and [run.engine.ended.count(number) for number in range(4)] == [1, 1, 1, 2]


def test_a_step_whose_columns_are_lost_on_their_way_is_collected_again_and_observed_once():
    run, observed = Run(0, 3), []
    run.engine.keeps = set()
    run.ahead._worker.observe = lambda rollout, version: observed.append(version) or {}
    run.step(0)
    run.step(1)
    run.engine.keeps = {handle for handle in run.engine.keeps if not handle.startswith("2/")}
    again = run.ahead.collect(1).completions_B
    assert run.ahead.snapshot()()["position"] == 4
    run.step(2)
    run.ahead.close()
    assert run.trained == [["0", "1"], ["2", "3"], ["4", "5"]] and observed == [0, 1, 2]
    assert [member.problem.id for member in again[::4]] == ["2", "3"]
    assert [run.engine.ended.count(number) for number in range(6)] == [1, 1, 2, 1, 1, 1]


def test_a_kept_completion_counts_like_another_one():
    run = Run(1, 2)
    run.engine.keeps = set()
    run.engine.slow.set()
    run.ahead.begin(0)
    rollout = run.ahead.collect(0)
    run.ahead.close()
    metrics = compute_rollout_metrics(rollout)
    assert (metrics["tokens/generated"], metrics["length/max"], metrics["groups/equal_excess"]) == (16.0, 2.0, 0.0)
    samples = to_training_samples(rollout)
    assert [(each.length, each.sampled_count, len(each.response_ids), each.remote.trained_at) for each in samples] == [(3, 2, 0, 0)] * 8
    assert build_sample_rows(1, rollout.completions_B, 1)[0]["versions"] == [0, 0]


@pytest.mark.parametrize("losses", [0, 1, 3])
def test_texts_that_an_engine_keeps_are_scored_there_and_lost_ones_are_sampled_again(losses):
    run = Run(0, 1)
    run.engine.keeps, run.engine.keeps_texts, run.engine.losses = set(), True, losses
    run.engine.slow.set()
    run.ahead.begin(0)
    rollout = run.ahead.collect(0)
    run.ahead.close()
    assert sorted(run.engine.scored) == ["0", "1"] and run.scored == [] and len(run.engine.ended) == 2 + losses
    assert [member.reward.value for member in rollout.completions_B] == [0.0, 1.0] * 4
    metrics = compute_rollout_metrics(rollout)
    assert (metrics["length/thought_share"], metrics["length/unfinished_thoughts"]) == (0.25, 0.25)
    rows = build_sample_rows(1, rollout.completions_B, 3)
    assert [row["completion"] for row in rows] == run.engine.read and [bool(each.text) for each in rollout.completions_B].count(True) == 3
    assert {(row["thought"], row["response"]) for row in rows} <= {("thought", "answer"), ("thought", "")}


class Engine:
    """Returns two tokens for every prompt, sampled by the given versions."""

    def __init__(self, *versions: int) -> None:
        self.versions = list(versions)

    def generate(self, prompts_B, samplings, abort=None):
        sampled = np.array([97, 98]), np.array([-1.0, -2.0]), "stop", self.versions[-1], np.array(self.versions)
        return [Generation(*sampled) for _ in prompts_B]


def answer(engine: Engine, version: int, staleness: int) -> Completion:
    tokenizer = tokenizer_of(lambda text, add_special_tokens: [65])
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
    """The second completion is short. The third one begins with a token of an environment, followed by a stale token."""
    long, short = sampled([0] * 70, [0.01] * 32 + [0.02] * 32 + [0.04] * 6), sampled([0] * 3, [-0.03] * 3)
    mixed = sampled([1, 0], [9.0, 0.05])
    mixed.response_ids, mixed.response_mask = torch.tensor([2] * 3), torch.tensor([False, True, True])
    metrics = measure_mismatch([long, short, mixed], by_position=True)
    by_bin = {
        start: (metrics[f"mismatch/position/{start}/tokens"], metrics[f"mismatch/position/{start}/abs_mean"]) for start in (0, 32, 64)
    }
    assert by_bin == {0: (36, close((0.32 + 0.09 + 0.05) / 36)), 32: (32, close(0.02)), 64: (6, close(0.04))}
    assert len(metrics) == 4 + 6 and metrics["mismatch/tokens"] == 36 + 32 + 6
    assert bin_mismatch(long) == [(32, close(0.01)), (32, close(0.02)), (6, close(0.04))]
    assert bin_mismatch(mixed) == [(1, close(0.05))] and bin_mismatch(sampled([], [])) == []


def config(**sections: dict) -> Config:
    return Config.model_validate({"model": {"path": "m"}, **sections}, strict=False)


def test_stale_tokens_may_be_trained_on_with_a_correction():
    """Refusals: tests/unit/preflight/test_rules.py."""
    for algorithm in ({"correction": "tis"}, {"old_policy": "engine"}):
        check(Facts(config(placement={"kind": "disaggregated", "max_staleness": 1}, algorithm=algorithm)), Needs.TRAINER)
    check(Facts(config(log={"attribute_every": 2})), Needs.TRAINER)
    with pytest.raises(ValueError, match='needs kind = "disaggregated"'):  # who takes turns cannot run ahead
        config(placement={"max_staleness": 1})
