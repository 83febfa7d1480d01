"""Metrics of sampled completions, and the sample rows of the report."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from megatron_rl.metrics import declare
from megatron_rl.rollout.groups import GENERATE, RolloutBatch
from megatron_rl.types import Completion

T = TypeVar("T")
_REWARD_MEAN = declare("reward/mean", "mean reward of the sampled completions", "number", "reward", progress="reward {:.3f}")
_REWARD_STD = declare("reward/std", "standard deviation of the rewards")
_REWARD_PART = declare("reward/part/{}", "mean of the reward function {}, before its weight")
_REWARD_ERRORS = declare("reward/errors", "completions without a verdict", "count")
_OVERLONG = declare("reward/overlong", "mean length penalty, in addition to the reward")
_ACCURACIES = (
    declare("accuracy/train", "share of correct completions, as sampled", "share", "correct", label="training", progress="train {:.1%}"),
    declare("accuracy/level_{}", "share of correct completions, level {}", "share"),
    declare("accuracy/source_{}", "share of correct completions, set {}", "share"),
)
_LENGTH_MEAN = declare("length/mean", "mean length of a completion, in sampled tokens", "number", "length (tokens)")
_LENGTH_MAX = declare("length/max", "longest completion, in sampled tokens", "count", "length (tokens)", label="longest")
_TRUNCATED = declare("length/truncated", "share of completions cut at the length limit", "share", "cut at the limit")
_THOUGHT = declare("length/thought_share", "mean share of a completion's characters in its thought", "share", "thought")
_UNFINISHED = declare("length/unfinished_thoughts", "share of completions that end inside their thought", "share", "cut at the limit")
_SAME_NUMBERS = "engines that draw the same random numbers (engine_seeds in run.json)"
MOST_EQUAL = 10.0
EQUAL = declare(
    "groups/equal_excess",
    "pairs of equal completions in a group beyond those expected by chance, in standard deviations",
    expected=(0.0, MOST_EQUAL),
    causes=("", _SAME_NUMBERS),
)
_TOKENS = declare("tokens/generated", "tokens generated", "count")
_SPEED = declare("tokens/per_second", "tokens per second of generation", "count", "tokens per second", progress="{:,.0f} tokens/s")
_CACHED = declare("tokens/cached_share", "share of the prompts' tokens, of all turns, that came from the engines' prefix cache", "share")
_ENVIRONMENT = (
    declare("environment/turns", "mean number of the policy's turns in a completion"),
    declare("environment/token_share", "share of the completions' tokens that the environment wrote", "share"),
    declare("environment/tool_errors", "messages with which the environment refused a request of the policy", "count"),
    declare("environment/errors", "completions whose environment failed", "count"),
)
_AGENT = (
    declare("agent/calls", "mean number of the policy's answers in an episode"),
    declare("agent/conversations", "mean number of an episode's conversations, each a training sample"),
    declare("agent/read_share", "share of the conversations' tokens that are read and not trained on", "share"),
    declare("agent/dropped", "requests whose response nobody received, so that it is not trained on", "count"),
    declare("agent/tool_errors", "answers with a malformed tool call", "count"),
    declare("agent/foreign_histories", "requests that repeat a conversation otherwise than it was, so that another one begins", "count"),
    declare("agent/errors", "episodes whose agent failed", "count"),
    declare("agent/stopped", "episodes cut at agent.max_calls", "count"),
)


def compute_accuracies(completions: Sequence[Completion], overall: str, by_level: str, by_source: str) -> dict[str, float]:
    """Return the share of correct completions, overall and per difficulty level, or per data set if there are several."""
    verdicts_by_part: dict[Any, list[bool]] = {}
    several = len({completion.problem.source for completion in completions}) > 1
    for completion in completions:
        part = completion.problem.source if several else completion.problem.level
        verdicts_by_part.setdefault(part, []).append(completion.reward.correct)
    accuracies = {overall: sum(completion.reward.correct for completion in completions) / len(completions)}
    for part, verdicts in sorted(verdicts_by_part.items()) if len(verdicts_by_part) > 1 else []:
        accuracies[(by_source if several else by_level).format(part)] = sum(verdicts) / len(verdicts)
    return accuracies


def compute_rollout_metrics(rollout: RolloutBatch) -> dict[str, float]:
    completions = [*rollout.completions_B, *rollout.discarded_B]
    count = len(completions)
    rewards = [completion.reward.value for completion in completions if not completion.reward.excluded] or [0.0]
    lengths = [completion.total_sampled for completion in completions]
    mean = sum(rewards) / len(rewards)
    return {
        _REWARD_MEAN: mean,
        _REWARD_STD: (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        **_reward_parts(completions),
        _REWARD_ERRORS: _count(completions, lambda completion: completion.reward.error),
        _OVERLONG: sum(completion.length_penalty for completion in completions) / count,
        **compute_accuracies(completions, *_ACCURACIES),
        _LENGTH_MEAN: sum(lengths) / count,
        _LENGTH_MAX: float(max(lengths)),
        _TRUNCATED: _count(completions, lambda completion: completion.finish_reason == "length") / count,
        **_thought_metrics(completions),
        EQUAL: compute_equal_excess(completions),
        _TOKENS: float(sum(lengths)),
        _SPEED: sum(lengths) / rollout.seconds[GENERATE],
        _CACHED: sum(completion.cached_tokens for completion in completions) / (sum(item.prompt_tokens for item in completions) or 1),
        **(_environment_metrics(completions) if completions[0].calls is None else _agent_metrics(completions)),
        **rollout.seconds,
        **rollout.sampling,
    }


def _count(completions: Sequence[Completion], condition: Callable[[Completion], object]) -> float:
    return float(sum(bool(condition(completion)) for completion in completions))


def _reward_parts(completions: Sequence[Completion]) -> dict[str, float]:
    parts = [completion.reward.parts for completion in completions if completion.reward.parts]
    values = {label: [part[label] for part in parts if label in part] for label in dict.fromkeys(chain(*parts))}
    return {_REWARD_PART.format(label): sum(each) / len(each) for label, each in values.items()}


def _thought_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the share of thoughts and of unfinished ones. Empty if no completion has a thought."""
    shares = [completion.thought_share for completion in completions]
    if not any(shares):
        return {}
    unfinished = _count(completions, lambda completion: completion.answer_text is None)
    return {_THOUGHT: sum(shares) / len(shares), _UNFINISHED: unfinished / len(completions)}


def compute_equal_excess(completions: Sequence[Completion]) -> float:
    """Return by how many standard deviations the number of equal pairs in groups exceeds the number expected of independent draws, or 0.

    Two independent draws are equal with probability sum_x p(x)^2, of which the mean of p over the members of a group is an unbiased
    estimate. The number of such rare events has about its mean as variance; 1 is added, so that one pair is no alarm.
    """
    groups: dict[int, list[Completion]] = {}
    for completion in completions:
        groups.setdefault(id(completion.problem), []).append(completion)
    equal = expected = 0.0
    for members in groups.values():
        counts = Counter(each.remote.digest if each.remote else np.asarray(each.output_ids_T).tobytes() for each in members).values()
        equal += sum(count * (count - 1) / 2 for count in counts)
        sums = (each.remote.logprob_sum if each.remote else float(np.sum(each.logprobs_T)) for each in members)
        likelihood = sum(math.exp(min(total, 0.0)) for total in sums)
        expected += (len(members) - 1) / 2 * likelihood
    return max(0.0, equal - expected) / math.sqrt(expected + 1)


def _environment_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    multi_turn = [completion for completion in completions if completion.dialogue]
    if not multi_turn:
        return {}
    tokens = sum(len(completion.output_ids_T) for completion in multi_turn)
    values = (
        sum(completion.num_turns for completion in multi_turn) / len(multi_turn),
        (tokens - sum(completion.sampled_count for completion in multi_turn)) / max(tokens, 1),
        float(sum(completion.tool_errors for completion in multi_turn)),
        _count(multi_turn, lambda completion: completion.environment_error),
    )
    return dict(zip(_ENVIRONMENT, values, strict=True))


def _agent_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    count, conversations = len(completions), [each for completion in completions for each in completion.conversations]
    tokens = sum(len(each.output_ids_T) for each in conversations)
    values = (
        sum(completion.calls or 0 for completion in completions) / count,
        len(conversations) / count,
        1 - sum(each.sampled_count for each in conversations) / max(tokens, 1),
        float(sum(completion.dropped_calls for completion in completions)),
        float(sum(completion.tool_errors for completion in completions)),
        float(sum(completion.foreign_histories for completion in completions)),
        _count(completions, lambda completion: completion.environment_error),
        _count(completions, lambda completion: completion.finish_reason == "turns"),
    )
    return dict(zip(_AGENT, values, strict=True))


def build_sample_rows(step: int, completions: Sequence[Completion], count: int) -> list[dict[str, Any]]:
    """Return the report's rows of `count` completions, spread evenly over the step. `versions`: of the oldest and the newest token."""
    return [
        {
            "step": step,
            "problem": (problem := completion.problem).id,
            "versions": _find_versions(step - 1, completion),
            **{"level": problem.level, "prompt": problem.prompt, "completion": completion.text, "answer": problem.answer},
            **({"thought": completion.thought, "response": completion.answer_text or ""} if completion.thought else {}),
            **{"reward": (reward := completion.reward).value, "correct": reward.correct, "parts": reward.parts},
            **{"finish_reason": completion.finish_reason, "error": reward.error},
            **({"dialogue": completion.dialogue} if completion.dialogue else {}),
            **({"history_notes": completion.history_notes} if completion.history_notes else {}),
        }
        for completion in select_evenly(completions, count)
    ]


def _find_versions(trained_at: int, completion: Completion) -> list[int]:
    if completion.remote is not None:
        return [completion.remote.versions[0], completion.remote.versions[-1]]
    lags_T = completion.version_lags_T
    return [trained_at] * 2 if lags_T is None or not len(lags_T) else [trained_at - int(lags_T.max()), trained_at - int(lags_T.min())]


def select_evenly(values: Sequence[T], count: int) -> list[T]:
    """Return `count` of the values, or all of them if there are fewer, spread evenly."""
    count = min(count, len(values))
    return [values[index * len(values) // count] for index in range(count)]
