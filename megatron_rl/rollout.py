"""Rank 0's side of a step: problems -> the engine's completions -> rewards, in whole groups; and held-out evaluation."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.algorithm.overlong import overlong_reward
from megatron_rl.config import Config
from megatron_rl.data import ProblemStream
from megatron_rl.engine import Engine
from megatron_rl.errors import RunError
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.types import Completion, Problem, Sampling


@dataclass
class Rollout:
    """One step's completions, the group of each prompt side by side, and the seconds of each phase."""

    completions_B: list[Completion]
    seconds: dict[str, float] = field(default_factory=dict)
    discarded_B: list[Completion] = field(default_factory=list)
    """Members of groups that dynamic sampling left out; they cost time and count in the metrics."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Metrics of dynamic sampling; empty where it is off."""


class RolloutWorker:
    """Owns what only rank 0 has: the engine, the problems, the tokenizer and the reward workers."""

    def __init__(
        self, config: Config, engine: Engine, stream: ProblemStream, held_out: list[Problem], tokenizer: Any, rewards: RewardPool
    ) -> None:
        self._config, self._engine, self._stream, self._tokenizer, self._rewards = config, engine, stream, tokenizer, rewards
        self._held_out = held_out[: config.data.eval_size]

    def state_dict(self) -> dict[str, Any]:
        """Where the problems stand; see `ProblemStream`. The draws need no state: see `draw_seed`."""
        return self._stream.state_dict()

    def collect(self, version: int) -> Rollout:
        """Samples and scores one step's groups. Raises RunError where a completion was sampled by another policy version.

        Dynamic sampling (DAPO, arXiv 2503.14476): a group whose members all earn the same teaches nothing, and is drawn anew from the
        next problem; after the last round such groups fill what is missing, so that the batch keeps its size.
        """
        wanted, rounds = self._config.rollout.prompts_per_step, self._config.algorithm.dynamic_sampling_max_rounds
        rollout = self._groups(wanted, version, 0)
        if not rounds:
            return rollout
        seconds, drawn = dict(rollout.seconds), 1
        kept, dull = _by_signal(rollout, self._config.rollout.group_size)
        while len(kept) < wanted and drawn < rounds:
            more, drawn = self._groups(wanted - len(kept), version, drawn), drawn + 1
            seconds = {name: spent + more.seconds[name] for name, spent in seconds.items()}
            for groups, found in zip((kept, dull), _by_signal(more, self._config.rollout.group_size), strict=True):
                groups += found
        missing = wanted - len(kept)
        counts = {"rounds": drawn, "discarded": len(dull) - missing, "without_signal": missing}
        return Rollout(
            [member for group in [*kept, *dull[:missing]] for member in group],
            seconds,
            [member for group in dull[missing:] for member in group],
            {f"sampling/{name}": float(count) for name, count in counts.items()},
        )

    def _groups(self, prompts: int, version: int, drawn: int) -> Rollout:
        """The groups of the next `prompts` problems, with the penalty for length where it is on; `drawn`: rounds before in this step."""
        problems_P = self._stream.next_batch(prompts)
        problems_B = [problem for problem in problems_P for _ in range(self._config.rollout.group_size)]
        rollout = self._sample(problems_B, version, f"train/{drawn}")
        algorithm, longest = self._config.algorithm, self._config.rollout.max_new_tokens
        for completion in rollout.completions_B:
            length = len(completion.output_ids_T)
            completion.overlong = overlong_reward(length, longest, algorithm.overlong_share, algorithm.overlong_penalty)
        return rollout

    def evaluate(self, version: int) -> dict[str, float]:
        """Accuracy on the held-out problems: one sampled completion each, at the training temperature."""
        if not self._held_out:
            return {}
        start = time.perf_counter()
        completions = self._sample(self._held_out, version, "eval").completions_B
        return {**accuracies(completions, "eval/accuracy", "eval/level_"), "time/eval": time.perf_counter() - start}

    def _sample(self, problems_B: Sequence[Problem], version: int, purpose: str) -> Rollout:
        config, seed = self._config.rollout, self._config.train.seed
        prompts = [self._tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems_B]
        start = time.perf_counter()
        seeds = [draw_seed(seed, version, purpose, index) for index in range(len(prompts))]
        answers = self._engine.generate(prompts, [Sampling(config.temperature, config.max_new_tokens, one) for one in seeds])
        generated = time.perf_counter()
        completions = []
        for problem, prompt, answer in zip(problems_B, prompts, answers, strict=True):
            if answer.policy_version != version:
                raise RunError(f"a completion was sampled by policy version {answer.policy_version}, the trainer holds version {version}")
            text = self._tokenizer.decode(answer.output_ids_T, skip_special_tokens=True)
            completions.append(
                Completion(problem, prompt, answer.output_ids_T, answer.logprobs_T, answer.finish_reason, answer.policy_version, text)
            )
        rewards = self._rewards.score([completion.text for completion in completions], list(problems_B))
        for completion, reward in zip(completions, rewards, strict=True):
            completion.reward = reward
        return Rollout(completions, {"time/generate": generated - start, "time/reward": time.perf_counter() - generated})


def draw_seed(run: int, version: int, purpose: str, index: int) -> int:
    """The seed (63 bits) of one completion's draws: a function of the run's seed, the policy version and which completion it is, so that
    a run that goes on from a checkpoint draws what it would have drawn."""
    return int.from_bytes(hashlib.sha256(f"{run}/{version}/{purpose}/{index}".encode()).digest()[:8], "big") >> 1


def _by_signal(rollout: Rollout, group_size: int) -> tuple[list[list[Completion]], list[list[Completion]]]:
    """(groups whose members' rewards differ, the others). Length penalties do not count: they would keep groups that are all wrong."""
    groups = [rollout.completions_B[start : start + group_size] for start in range(0, len(rollout.completions_B), group_size)]
    differ = [len({member.reward.value for member in group}) > 1 for group in groups]
    return [g for g, yes in zip(groups, differ, strict=True) if yes], [g for g, yes in zip(groups, differ, strict=True) if not yes]


def accuracies(completions: Sequence[Completion], overall: str, by_level: str) -> dict[str, float]:
    """Share of correct completions, overall and for each difficulty level."""
    levels = sorted({completion.problem.level for completion in completions})
    found = {overall: sum(completion.reward.correct for completion in completions) / len(completions)}
    for level in levels if len(levels) > 1 else []:
        members = [completion.reward.correct for completion in completions if completion.problem.level == level]
        found[f"{by_level}{level}"] = sum(members) / len(members)
    return found


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Rewards, accuracy, lengths and throughput of all that was sampled in one step."""
    completions = [*rollout.completions_B, *rollout.discarded_B]
    count = len(completions)
    rewards = [completion.reward.value for completion in completions]
    lengths = [len(completion.output_ids_T) for completion in completions]
    mean = sum(rewards) / count
    return {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / count) ** 0.5,
        "reward/errors": float(sum(bool(completion.reward.error) for completion in completions)),
        "reward/overlong": sum(completion.overlong for completion in completions) / count,
        **accuracies(completions, "accuracy/train", "accuracy/level_"),
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths)),
        "length/truncated": sum(completion.finish_reason == "length" for completion in completions) / count,
        "tokens/generated": float(sum(lengths)),
        "tokens/per_second": sum(lengths) / rollout.seconds["time/generate"],
        **rollout.seconds,
        **rollout.sampling,
    }


def sample_rows(step: int, completions: Sequence[Completion], count: int) -> list[dict[str, Any]]:
    """Rows for the report: `count` completions spread evenly over the step's."""
    count = min(count, len(completions))
    chosen = [completions[index * len(completions) // count] for index in range(count)]
    return [
        {
            "step": step,
            "level": completion.problem.level,
            "prompt": completion.problem.prompt,
            "completion": completion.text,
            "answer": completion.problem.answer,
            "reward": completion.reward.value,
            "correct": completion.reward.correct,
            "advantage": completion.advantage,
            "finish_reason": completion.finish_reason,
            "error": completion.reward.error,
        }
        for completion in chosen
    ]
