"""Metrics and sample rows of rollouts, and the choice of groups."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from support.agents import ChatTokenizer

from megatron_rl.config import Config
from megatron_rl.config.data import DataConfig
from megatron_rl.data import ProblemOrder, ProblemStream
from megatron_rl.errors import RunError
from megatron_rl.rewards.thinking import Response
from megatron_rl.rollout.constant_rewards import ConstantRewards
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.groups import RolloutBatch, derive_seed
from megatron_rl.rollout.metrics import build_sample_rows, compute_accuracies, compute_rollout_metrics
from megatron_rl.rollout.worker import RolloutWorker
from megatron_rl.types import Completion, Generation, Problem, Reward, SamplingParams


def completion(level: int, correct: bool, length: int = 3, finish: str = "stop", source: str = "", **reward: object) -> Completion:
    rewarded = Reward(**{"value": float(correct), "correct": correct, **reward})
    problem = Problem(f"id-{level}", f"prompt {level}", "42", level=level, source=source)
    return Completion(problem, [1], [2] * length, [-0.5] * length, finish, 0, f"text {level}", rewarded)


@pytest.mark.parametrize("completions, accuracies", [
    (
        [completion(1, True), completion(1, True), completion(3, False), completion(3, True), completion(2, False)],
        {"all": 0.6, "level_1": 1.0, "level_2": 0.0, "level_3": 0.5},
    ),
    (  # levels of several sets do not compare
        [completion(1, True), completion(1, False, source="math"), completion(3, True, source="math"), completion(2, False)],
        {"all": 0.5, "source_": 0.5, "source_math": 0.5},
    ),
    ([completion(0, True), completion(0, False)], {"all": 0.5}),
], ids=["by level", "by set", "one level"])  # fmt: skip
def test_accuracy_overall_and_by_level_or_set(completions, accuracies):
    assert compute_accuracies(completions, "all", "level_{}", "source_{}") == accuracies


def test_metrics_of_a_step():
    completions = [
        completion(1, True, length=2),
        completion(1, False, length=7, finish="length", value=0.5),
        completion(2, False, length=3, error="timed out"),
        completion(2, True, length=8, finish="length"),
    ]
    metrics = compute_rollout_metrics(RolloutBatch(completions, {"ahead/generate": 4.0, "ahead/reward": 1.0}))
    expected = {
        "reward/mean": 0.625, "reward/std": ((0.375**2 + 0.125**2 + 0.625**2 + 0.375**2) / 4) ** 0.5, "reward/errors": 1,
        "reward/overlong": 0, "accuracy/train": 0.5, "accuracy/level_1": 0.5, "accuracy/level_2": 0.5, "length/mean": 5, "length/max": 8,
        "length/truncated": 0.5, "groups/equal_excess": 0, "tokens/generated": 20, "tokens/per_second": 5, "tokens/cached_share": 0,
        "ahead/generate": 4, "ahead/reward": 1,
    }  # fmt: skip
    assert metrics == pytest.approx(expected)


def test_metrics_leave_out_what_is_excluded():
    completions = [completion(0, True), completion(0, False), completion(0, False, error="timed out"), completion(0, False, error="died")]
    for member, parts in zip(completions, [{"math": 1.0, "format": 0.0}, {"math": 0.0, "format": 1.0}, {}, {}], strict=True):
        member.reward.parts, member.reward.excluded = parts, bool(member.reward.error)
    metrics = compute_rollout_metrics(RolloutBatch(completions, {"ahead/generate": 4.0}))
    assert (metrics["reward/mean"], metrics["reward/std"], metrics["reward/errors"]) == (0.5, 0.5, 2)
    assert (metrics["reward/part/math"], metrics["reward/part/format"]) == (0.5, 0.5)
    assert metrics["accuracy/train"] == 0.25, "without a verdict nothing is correct"
    for member in completions:
        member.reward.excluded = True
    assert compute_rollout_metrics(RolloutBatch(completions, {"ahead/generate": 4.0}))["reward/mean"] == 0.0


def test_a_sample_row_tells_all_of_a_completion_and_the_versions_of_its_oldest_and_newest_token_and_is_json():
    member = completion(3, True)
    member.version_lags_T = np.array([2, 2, 1], dtype=np.uint8)
    assert build_sample_rows(7, [member], 8)[0]["versions"] == [4, 5]
    member = completion(3, False, finish="length", error="timed out", value=0.125)
    (row,) = build_sample_rows(7, [member], 8)
    assert json.loads(json.dumps(row)) == {
        "step": 7, "problem": "id-3", "versions": [6, 6],
        "level": 3, "prompt": "prompt 3", "completion": "text 3", "answer": "42", "reward": 0.125, "correct": False,
        "parts": {}, "finish_reason": "length", "error": "timed out",
    }  # fmt: skip


@pytest.mark.parametrize("total, count", [(8, 0), (3, 8), (8, 8), (0, 8), (256, 8), (15, 8), (10, 4), (9, 5), (7, 2)])
def test_sample_rows_are_as_many_as_asked_or_all_and_spread_evenly(total, count):
    levels = [row["level"] for row in build_sample_rows(0, [completion(index, True) for index in range(total)], count)]
    assert len(levels) == min(total, count)
    if levels:
        gaps = [after - before for before, after in zip([-1, *levels], [*levels, total], strict=True)]
        assert max(gaps) <= -(-total // count) + 1, f"rows {levels} leave a part of {total} completions out"


class FakeEngine:
    """Returns the completion's number within its group as one letter."""

    version = 5

    def __init__(self):
        self.sampling, self.requests = [], []

    def generate(self, prompts_B, sampling, abort=None):
        self.sampling += sampling
        prompts = [prompt.tobytes() for prompt in prompts_B]
        self.requests.append(len(prompts))
        letters = [ord("a") + prompts[:index].count(prompt) for index, prompt in enumerate(prompts)]
        return [Generation(np.array([letter]), np.array([-1.0]), "stop", self.version) for letter in letters]


class FakeRewards:
    """Rewards only the first completion of each group of four."""

    def split(self, text, problem):
        return Response(text, "")

    def score(self, texts, problems, lengths, broken, *_):
        assert len(texts) == len(problems) and lengths == [1] * len(texts)
        return [Reward(float(text == "a"), text == "a") for text in texts]


def make_worker(engine: FakeEngine, rewards: object, **sections: dict[str, object]) -> RolloutWorker:
    rollout = {"prompts_per_step": 2, "group_size": 4, **sections.pop("rollout", {})}
    config = Config.model_validate({"model": {"path": "m"}, "rollout": rollout, **sections}, strict=False)
    stream = ProblemStream(ProblemOrder(lambda position: Problem(str(position), f"q{position}", "x"), "fingerprint"))
    held_out = [Problem("held", f"h{level}", "x", level=level) for level in (1, 2)]
    return RolloutWorker(config, MultiTurnSampler(engine, ChatTokenizer(), data=DataConfig(chat=True)), stream, held_out, rewards)


def test_groups_lie_side_by_side():
    worker = make_worker(FakeEngine(), FakeRewards())
    completions = worker.collect(worker.draw(5)).completions_B
    assert [member.problem.id for member in completions] == ["0"] * 4 + ["1"] * 4
    assert [member.text for member in completions] == list("abcd" * 2)
    assert [member.reward.value for member in completions] == [1.0, 0.0, 0.0, 0.0] * 2
    assert [member.problem.id for member in worker.collect(worker.draw(5)).completions_B] == ["2"] * 4 + ["3"] * 4
    with pytest.raises(RunError, match="sampled by policy version 5, the trainer holds version 6"):
        worker.collect(worker.draw(6))


def test_draws_are_a_function_of_version_and_place():
    worker = make_worker(engine := FakeEngine(), FakeRewards())
    worker.collect(worker.draw(5))
    first = {sampling.seed for sampling in engine.sampling}
    assert len(first) == 8
    worker.collect(worker.draw(5))
    assert len(engine.sampling) == 16 and {sampling.seed for sampling in engine.sampling} == first, "another place"
    worker.evaluate(5)
    assert len(engine.sampling) > 16 and not {sampling.seed for sampling in engine.sampling[16:]} & first


def test_held_out_problems_are_sampled_by_settings_of_their_own():
    engine, eval_settings = FakeEngine(), {"samples": 2, "temperature": 0.25, "top_k": 3}
    worker = make_worker(engine, FakeRewards(), rollout={"stop": ["\n"], "min_p": 0.1, "max_new_tokens": 7}, eval=eval_settings)
    completions = worker.evaluate(5).completions_B
    assert [member.problem.level for member in completions] == [1, 1, 2, 2]
    assert [member.reward.correct for member in completions] == [True, False] * 2
    assert len({sampling.seed for sampling in engine.sampling}) == 4
    for sampling in engine.sampling:
        assert replace(sampling, seed=None) == SamplingParams(0.25, 7, None, ("\n",), top_k=3, min_p=0.1)
    worker.collect(worker.draw(5))
    assert replace(engine.sampling[-1], seed=None) == SamplingParams(1.0, 7, None, ("\n",), min_p=0.1)


@pytest.mark.parametrize("samples, size, requests", [(1, 4, [4, 1]), (2, 4, [4, 4, 2]), (3, 4, [3] * 5), (4, 3, [4] * 5), (1, 8, [5])])
def test_a_request_of_an_evaluation_has_as_many_completions_as_one_of_the_rollout(samples, size, requests):
    """Each completion has the seed that it has in a request of its own."""
    worker = make_worker(engine := FakeEngine(), FakeRewards(), rollout={"group_size": size}, eval={"samples": samples})
    worker._held_out = [Problem(str(number), f"{number}", "x") for number in range(5)]
    completions = worker.evaluate(5).completions_B
    assert sorted(engine.requests, reverse=True) == requests
    assert [member.problem.id for member in completions] == [str(number) for number in range(5) for _ in range(samples)]
    assert [member.text for member in completions] == [*"abcd"[:samples]] * 5
    assert {sampling.seed for sampling in engine.sampling} == {derive_seed(0, 5, "eval", index) for index in range(5 * samples)}


@pytest.mark.parametrize("changes, size", [
    ({}, 16),
    ({"max_new_tokens": 1000}, 8),
    ({"max_new_tokens": 4096}, 4),
    ({"max_running_requests": 4}, 4),
    ({"prompts_per_step": 12}, 4),
    ({"over_sampling_prompts": 4}, 4),
], ids=str)  # fmt: skip
def test_short_groups_of_a_large_step_share_requests(changes, size):
    """Each completion has the seed that it has in a request of its group alone."""
    rollout = {"prompts_per_step": 32, "max_new_tokens": 24, "max_running_requests": 256, **changes}
    worker = make_worker(engine := FakeEngine(), FakeRewards(), rollout=rollout)
    completions = worker.collect(worker.draw(5)).completions_B
    prompts = rollout["prompts_per_step"]
    assert set(engine.requests) == {size} and len(completions) == 4 * prompts
    assert [member.text for member in completions] == [*"abcd"] * prompts
    seeds = {sampling.seed for sampling in engine.sampling}
    assert seeds <= {derive_seed(0, 5, "train/0", index) for index in range(4 * (prompts + 4))}


class Scripted(FakeRewards):
    """Returns scripted rewards of each problem's group, one per completion."""

    def __init__(self, groups: dict[str, list[float]]) -> None:
        self.groups, self.asked = groups, []

    def score(self, texts, problems, lengths, broken, *_):
        self.asked.append(problems[0].id)
        return [Reward(self.groups.get(problem.id, [0.0] * 4)[index % 4], False) for index, problem in enumerate(problems)]


def dynamic(rounds: int, groups: dict[str, list[float]], rollout: dict | None = None, **algorithm: object):
    """Return a worker with dynamic sampling, and its rewards."""
    rewards = Scripted(groups)
    sections = {"rollout": rollout or {}, "algorithm": {"dynamic_sampling_max_rounds": rounds, **algorithm}}
    return make_worker(FakeEngine(), rewards, **sections), rewards


MIXED, EQUAL = [1.0, 0.0, 0.0, 1.0], [1.0] * 4


def test_dynamic_sampling_draws_as_many_groups_as_are_missing_and_ends_with_a_full_batch():
    worker, rewards = dynamic(10, {"0": EQUAL, "1": MIXED, "2": EQUAL, "3": EQUAL, "4": MIXED})
    rollout = worker.collect(worker.draw(5))
    assert [member.problem.id for member in rollout.completions_B] == ["1"] * 4 + ["4"] * 4
    assert [member.problem.id for member in rollout.discarded_B] == ["0"] * 4 + ["2"] * 4 + ["3"] * 4
    assert len(rewards.asked) == 5 == len(set(rewards.asked)), "each problem once"
    assert rollout.sampling == {"sampling/rounds": 4, "sampling/discarded": 3, "sampling/without_signal": 0}
    metrics = compute_rollout_metrics(rollout)
    assert metrics["reward/mean"] == (3 * 4 + 2 * 2) / 20, "what was left out was sampled as well"
    assert metrics["tokens/generated"] == 20 and metrics["sampling/rounds"] == 4
    worker, rewards = dynamic(3, {"1": MIXED})
    rollout = worker.collect(worker.draw(5))
    assert [member.problem.id for member in rollout.completions_B] == ["1"] * 4 + ["0"] * 4
    assert len(rewards.asked) == 4
    assert rollout.sampling == {"sampling/rounds": 3, "sampling/discarded": 2, "sampling/without_signal": 1}
    assert rollout.seconds.keys() == {"ahead/generate", "ahead/reward"}
    worker, rewards = dynamic(0, {})  # without it every group is taken
    rollout = worker.collect(worker.draw(5))
    assert len(rewards.asked) == 2 and rollout.sampling == {} and not rollout.discarded_B


def test_excluded_completions_give_a_group_no_signal():
    worker, scripted = dynamic(1, {"0": EQUAL, "1": MIXED})
    score = scripted.score
    scripted.score = lambda *args: [Reward(0.0, False, "timed out", excluded=True), *score(*args)[1:]]
    assert worker.collect(worker.draw(5)).sampling["sampling/without_signal"] == 1


def test_groups_outside_of_the_range_of_accuracy_are_replaced_and_fill_without_a_gradient():
    groups = {"0": [1.0, 0.0, 0.0, 0.0], "1": MIXED, "2": [1.0] * 3 + [0.0], "3": EQUAL}
    worker, scripted = dynamic(3, groups, accuracy_low=0.3, accuracy_high=0.7)
    score = scripted.score
    scripted.score = lambda *args: [replace(reward, correct=reward.value == 1.0) for reward in score(*args)]
    rollout = worker.collect(worker.draw(5))
    assert [member.problem.id for member in rollout.completions_B] == ["1"] * 4 + ["0"] * 4
    assert [member.masked for member in rollout.completions_B] == [False] * 4 + [True] * 4
    assert len(scripted.asked) == 4 and len(rollout.discarded_B) == 8


@pytest.mark.parametrize("mask", [False, True])
def test_truncated_completions_are_masked_on_request(mask):
    class CutEveryOther(FakeEngine):
        def generate(self, *args, **named):
            ends = itertools.cycle(["stop", "length"])
            return [replace(result, finish_reason=end) for result, end in zip(super().generate(*args, **named), ends, strict=False)]

    worker = make_worker(CutEveryOther(), FakeRewards(), algorithm={"mask_truncated_completions": mask})
    assert [member.masked for member in worker.collect(worker.draw(5)).completions_B] == [False, mask] * 4


def test_length_penalties_stay_beside_the_reward_and_give_no_signal():
    """All completions have 1 of 1 tokens. The penalty alone must not make a group worth keeping."""
    algorithm = {"overlong_share": 0.5, "overlong_penalty": 0.75}
    worker, _ = dynamic(1, {"0": EQUAL, "1": EQUAL}, rollout={"max_new_tokens": 1}, **algorithm)
    rollout = worker.collect(worker.draw(5))
    assert {(member.reward.value, member.length_penalty) for member in rollout.completions_B} == {(1.0, -0.75)}
    assert rollout.sampling["sampling/without_signal"] == 2
    assert compute_rollout_metrics(rollout)["reward/overlong"] == -0.75
    assert {member.score for member in rollout.completions_B} == {0.25}


class Failing(FakeRewards):
    """Gives the first `failed` completions of each problem's group no verdict."""

    def __init__(self, failed: int) -> None:
        self.failed = failed

    def score(self, texts, problems, lengths, broken, *_):
        return [Reward(0.0, False, "" if number % 4 >= self.failed else "KeyError: 'x'") for number in range(len(texts))]


@pytest.mark.parametrize("failed, limit, line", [
    (0, 0.0, ""), (2, 0.5, ""), (3, 0.75, ""), (1, 0.2, "2 of 8 completions got no verdict, and reward.max_error_share is 0.2; the most"),
    (3, 0.5, "6 of 8 completions got no verdict, and reward.max_error_share is 0.5; the most frequent reason: KeyError: 'x' (6)"),
    (4, 1.0, "8 of 8 completions got no verdict; the most frequent reason: KeyError: 'x' (8)"),
])  # fmt: skip
def test_a_run_ends_if_too_many_completions_have_no_verdict(failed, limit, line):
    worker = make_worker(FakeEngine(), Failing(failed), reward={"max_error_share": limit}, eval={"samples": 4})
    for collect in (lambda: worker.collect(worker.draw(5)), lambda: worker.evaluate(5)):
        if not line:
            collect()
        else:
            with pytest.raises(RunError, match=re.escape(line)):
                collect()


def test_a_reward_with_one_value_in_the_first_steps_is_named_once():
    lines: list[str] = []
    functions = [{"name": "math"}, {"name": "format", "pattern": "x"}]
    for sections, made in (
        ({"reward": {"functions": functions}}, lambda value: Reward(value, False, parts={"math": value, "format": 0.0})),
        ({"agent": {"name": "a:b", "own_reward": True}}, lambda value: Reward(0.25, True)),
        ({}, lambda value: Reward(value, False)),
    ):
        constant = ConstantRewards(Config.model_validate({"model": {"path": "m"}, **sections}, strict=False), lines.append)
        for version in range(5):
            members = [completion(0, False), completion(0, False), completion(0, False, error="timed out")]
            members[0].reward, members[1].reward = made(0.0), made(float(version == 1))
            constant.observe(version, members)
    start, end = "warning: the reward", "for all 6 completions of the first 3 steps, so nothing was learned from it; compare samples.jsonl"
    assert [line.rpartition(" with")[0] for line in lines] == [f"{start} format was 0 {end}", f"{start} agent.own_reward was 0.25 {end}"]
    resumed = ConstantRewards(Config.model_validate({"model": {"path": "m"}}, strict=False), lines.append)
    for version in range(1, 5):
        resumed.observe(version, [completion(0, False)] * 4)
    assert len(lines) == 2


def test_the_length_penalty_of_an_episode_is_that_of_its_longest_conversation():
    """As an agent's, with conversations of 6 and of 5 sampled tokens, 2 of which they share. The limit is 10 tokens."""
    worker = make_worker(FakeEngine(), FakeRewards(), rollout={"max_new_tokens": 10}, algorithm={"overlong_share": 0.5})
    sample = worker._groups.sample

    def sample_episodes(*arguments):
        rollout = sample(*arguments)
        for member in rollout.completions_B:
            member.output_ids_T = [1] * 6
            branch = completion(0, False, length=3)
            branch.shared_count, member.branches = 2, [branch]
        return rollout

    worker._groups.sample = sample_episodes
    members = worker.collect(worker.draw(5)).completions_B
    assert {member.length_penalty for member in members} == {-0.2} and members[0].total_sampled == 9
