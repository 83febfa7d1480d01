"""Rank 0's side of a step: problems -> the engine's completions -> rewards, in whole groups; and held-out evaluation."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.algorithm.length_penalty import compute_overlong_penalty
from megatron_rl.config import Config
from megatron_rl.data import ProblemStream
from megatron_rl.errors import EngineLostError
from megatron_rl.observability import hang_watchdog
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.environment_pool import EnvironmentPool
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.types import Completion, Problem, SamplingParams


@dataclass
class RolloutBatch:
    """One step's completions, the group of each prompt side by side, and the seconds of each phase."""

    completions_B: list[Completion]
    seconds: dict[str, float] = field(default_factory=dict)
    discarded_B: list[Completion] = field(default_factory=list)
    """Members of groups that dynamic sampling left out; they cost time and count in the metrics."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Metrics of dynamic sampling; empty where it is off."""


class RolloutWorker:
    """Owns what only rank 0 has: the engine, the problems, the tokenizer, the reward workers and the environments, if any."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        stream: ProblemStream,
        held_out: list[Problem],
        tokenizer: Any,
        rewards: Scorer,
        environments: EnvironmentPool | None = None,
    ) -> None:
        self._config, self._stream, self._rewards = config, stream, rewards
        self._sampler = MultiTurnSampler(engine, tokenizer, environments)
        self._held_out = held_out

    def state_dict(self) -> dict[str, Any]:
        """Where the problems stand; see `ProblemStream`. The draws need no state: see `derive_seed`."""
        return self._stream.state_dict()

    def collect(self, version: int) -> RolloutBatch:
        """Samples and scores the groups that the trainer trains on at `version`. Raises RunError where a token was sampled by another
        policy version than this and the `placement.max_staleness` before it, EngineLostError where the engine was lost: the problems then
        stand
        where they stood.

        Dynamic sampling (DAPO, arXiv 2503.14476): a group whose members all earn the same teaches nothing, and is drawn anew from the
        next problem; after the last round such groups fill what is missing, so that the batch keeps its size.
        """
        before = self._stream.state_dict()
        try:
            return self._collect(version)
        except EngineLostError:
            self._stream.load_state_dict(before)
            raise

    def _collect(self, version: int) -> RolloutBatch:
        wanted, rounds = self._config.rollout.prompts_per_step, self._config.algorithm.dynamic_sampling_max_rounds
        rollout = self._sample_groups(wanted, version, 0)
        if not rounds:
            return rollout
        seconds, drawn = dict(rollout.seconds), 1
        kept, dull = _split_by_reward_spread(rollout, self._config.rollout.group_size)
        while len(kept) < wanted and drawn < rounds:
            more, drawn = self._sample_groups(wanted - len(kept), version, drawn), drawn + 1
            seconds = {name: spent + more.seconds[name] for name, spent in seconds.items()}
            for groups, found in zip((kept, dull), _split_by_reward_spread(more, self._config.rollout.group_size), strict=True):
                groups += found
        missing = wanted - len(kept)
        counts = {"rounds": drawn, "discarded": len(dull) - missing, "without_signal": missing}
        return RolloutBatch(
            [member for group in [*kept, *dull[:missing]] for member in group],
            seconds,
            [member for group in dull[missing:] for member in group],
            {f"sampling/{name}": float(count) for name, count in counts.items()},
        )

    def _sample_groups(self, prompts: int, version: int, drawn: int) -> RolloutBatch:
        """The groups of the next `prompts` problems, with the penalty for length where it is on; `drawn`: rounds before in this step."""
        problems_P = self._stream.next_batch(prompts)
        problems_B = [problem for problem in problems_P for _ in range(self._config.rollout.group_size)]
        rollout = self._generate_and_score(problems_B, version, f"train/{drawn}", self._config.placement.max_staleness)
        algorithm, longest = self._config.algorithm, self._config.rollout.max_new_tokens
        for completion in rollout.completions_B:
            completion.length_penalty = compute_overlong_penalty(
                completion.sampled_count, longest, algorithm.overlong_share, algorithm.overlong_penalty
            )
        return rollout

    def evaluate(self, version: int) -> dict[str, float]:
        """Accuracy on the held-out problems: one sampled completion each, at the training temperature."""
        if not self._held_out:
            return {}
        start = time.perf_counter()
        completions = self._generate_and_score(self._held_out, version, "eval").completions_B
        return {**compute_accuracies(completions, "eval/accuracy", "eval/level_", "eval/source_"), "time/eval": time.perf_counter() - start}

    def _generate_and_score(self, problems_B: Sequence[Problem], version: int, purpose: str, staleness: int = 0) -> RolloutBatch:
        config, seed = self._config.rollout, self._config.train.seed
        start = time.perf_counter()
        seeds = [derive_seed(seed, version, purpose, index) for index in range(len(problems_B))]
        samplings = [SamplingParams(config.temperature, config.max_new_tokens, one) for one in seeds]
        completions = self._sampler.sample(problems_B, samplings, version, staleness)
        generated = time.perf_counter()
        hang_watchdog.enter_phase("reward")
        assign_rewards(completions, self._rewards)
        return RolloutBatch(completions, {"time/generate": generated - start, "time/reward": time.perf_counter() - generated})


def derive_seed(run: int, version: int, purpose: str, index: int) -> int:
    """The seed (63 bits) of one completion's draws: a function of the run's seed, the policy version and which completion it is, so that
    a run that goes on from a checkpoint draws what it would have drawn."""
    return int.from_bytes(hashlib.sha256(f"{run}/{version}/{purpose}/{index}".encode()).digest()[:8], "big") >> 1


def assign_rewards(completions_B: Sequence[Completion], rewards: Scorer) -> None:
    """Sets each completion's reward; one whose environment failed has no verdict."""
    rewards_B = rewards.score(
        [completion.text for completion in completions_B],
        [completion.problem for completion in completions_B],
        [completion.sampled_count for completion in completions_B],
        [completion.environment_error and f"environment: {completion.environment_error}" for completion in completions_B],
    )
    for completion, reward in zip(completions_B, rewards_B, strict=True):
        completion.reward = reward


def _split_by_reward_spread(rollout: RolloutBatch, group_size: int) -> tuple[list[list[Completion]], list[list[Completion]]]:
    """(groups whose members' rewards differ, the others). Length penalties do not count: they would keep groups that are all wrong."""
    groups = [rollout.completions_B[start : start + group_size] for start in range(0, len(rollout.completions_B), group_size)]
    differ = [len({member.reward.value for member in group if not member.reward.excluded}) > 1 for group in groups]
    return [g for g, yes in zip(groups, differ, strict=True) if yes], [g for g, yes in zip(groups, differ, strict=True) if not yes]


def compute_accuracies(completions: Sequence[Completion], overall: str, by_level: str, by_source: str) -> dict[str, float]:
    """Share of correct completions, overall and for each difficulty level; of several sets for each set, as their levels do not compare."""
    verdicts: dict[Any, list[bool]] = {}
    several = len({completion.problem.source for completion in completions}) > 1
    for completion in completions:
        part = completion.problem.source if several else completion.problem.level
        verdicts.setdefault(part, []).append(completion.reward.correct)
    found = {overall: sum(completion.reward.correct for completion in completions) / len(completions)}
    for part, correct in sorted(verdicts.items()) if len(verdicts) > 1 else []:
        found[f"{by_source if several else by_level}{part}"] = sum(correct) / len(correct)
    return found


def compute_rollout_metrics(rollout: RolloutBatch) -> dict[str, float]:
    """Rewards, accuracy, lengths and throughput of all that was sampled in one step."""
    completions = [*rollout.completions_B, *rollout.discarded_B]
    count = len(completions)
    rewards = [completion.reward.value for completion in completions if not completion.reward.excluded] or [0.0]
    lengths = [completion.sampled_count for completion in completions]
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        **_reward_parts(completions),
        "reward/errors": float(sum(bool(completion.reward.error) for completion in completions)),
        "reward/overlong": sum(completion.length_penalty for completion in completions) / count,
        **compute_accuracies(completions, "accuracy/train", "accuracy/level_", "accuracy/source_"),
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths)),
        "length/truncated": sum(completion.finish_reason == "length" for completion in completions) / count,
        "tokens/generated": float(sum(lengths)),
        "tokens/per_second": sum(lengths) / rollout.seconds.get("ahead/generate", rollout.seconds["time/generate"]),
        **_environment_metrics(completions),
        **rollout.seconds,
        **rollout.sampling,
    }


def _reward_parts(completions: Sequence[Completion]) -> dict[str, float]:
    """The mean of each reward function over the completions with a verdict; nothing where there is one function only."""
    parts = [completion.reward.parts for completion in completions if completion.reward.parts]
    return {f"reward/part/{label}": sum(part[label] for part in parts) / len(parts) for label in (parts[0] if parts else {})}


def _environment_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Turns, and the environments' share of the tokens and their errors; {} where there was none."""
    heard = [completion for completion in completions if completion.dialogue]
    if not heard:
        return {}
    said = sum(len(completion.output_ids_T) - completion.sampled_count for completion in heard)
    return {
        "environment/turns": sum(completion.num_turns for completion in heard) / len(heard),
        "environment/token_share": said / max(sum(len(completion.output_ids_T) for completion in heard), 1),
        "environment/tool_errors": float(sum(completion.tool_errors for completion in heard)),
        "environment/errors": float(sum(bool(completion.environment_error) for completion in heard)),
    }


def build_sample_rows(step: int, completions: Sequence[Completion], count: int) -> list[dict[str, Any]]:
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
            "parts": completion.reward.parts,
            "advantage": completion.advantage,
            "finish_reason": completion.finish_reason,
            "error": completion.reward.error,
            **({"dialogue": completion.dialogue} if completion.dialogue else {}),
        }
        for completion in chosen
    ]
