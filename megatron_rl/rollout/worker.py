"""Rollouts on rank 0: problems -> the engine's completions -> rewards, in whole groups; and held-out evaluation.

Each group is a request of its own, and is scored as soon as its members have ended. Groups wait in one queue for room in the engines: what
begins is always the group that was drawn first.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, TypeVar

from megatron_rl.algorithm.length_penalty import compute_overlong_penalty
from megatron_rl.config import Config
from megatron_rl.data import ProblemStream
from megatron_rl.errors import EngineLostError
from megatron_rl.metrics import STEP_SECONDS, declare
from megatron_rl.observability import hang_watchdog
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.engine import Abort
from megatron_rl.rollout.generation import Sampler
from megatron_rl.types import Completion, Problem, SamplingParams

T = TypeVar("T")
_REWARD_MEAN = declare("reward/mean", "mean reward of the sampled completions", "number", "reward", progress="reward {:.3f}")
_REWARD_STD = declare("reward/std", "standard deviation of the rewards")
_REWARD_PART = declare("reward/part/{}", "mean of the reward function {}, before its weight")
_REWARD_ERRORS = declare("reward/errors", "completions that no verdict could be had for", "count")
_OVERLONG = declare("reward/overlong", "mean length penalty, in addition to the reward")
_ACCURACIES = (
    declare("accuracy/train", "share of correct completions, as sampled", "share", "correct", label="training", progress="train {:.1%}"),
    declare("accuracy/level_{}", "share of correct completions, level {}", "share"),
    declare("accuracy/source_{}", "share of correct completions, set {}", "share"),
)
_LENGTH_MEAN = declare("length/mean", "mean length of a completion, in sampled tokens", "number", "length (tokens)")
_LENGTH_MAX = declare("length/max", "longest completion, in sampled tokens", "count", "length (tokens)", label="longest")
_TRUNCATED = declare("length/truncated", "share of completions cut at the length limit", "share", "cut at the limit")
_TOKENS = declare("tokens/generated", "tokens generated", "count")
_SPEED = declare("tokens/per_second", "tokens per second of generation", "count", "tokens per second", progress="{:,.0f} tokens/s")
_CACHED = declare("tokens/cached_share", "share of the prompts' tokens, of all turns, that came from the engines' prefix cache", "share")
_ENVIRONMENT = (
    declare("environment/turns", "mean number of the policy's turns in a completion"),
    declare("environment/token_share", "share of the completions' tokens that the environment wrote", "share"),
    declare("environment/tool_errors", "messages by which the environment refused what the policy asked for", "count"),
    declare("environment/errors", "completions whose environment failed", "count"),
)
_AGENT = (
    declare("agent/calls", "mean number of the policy's answers in an episode"),
    declare("agent/conversations", "mean number of an episode's conversations, each a training sample"),
    declare("agent/read_share", "share of the conversations' tokens that are read and not trained on", "share"),
    declare("agent/tool_errors", "answers that called a tool in a way that cannot be read", "count"),
    declare("agent/errors", "episodes whose agent failed", "count"),
    declare("agent/stopped", "episodes cut at agent.max_calls", "count"),
)
_SAMPLING = (
    declare("sampling/rounds", "rounds of sampling to fill the batch", "count"),
    declare("sampling/discarded", "groups left out because their members earned the same, or of no fitting accuracy", "count"),
    declare("sampling/without_signal", "groups in the batch whose members earned the same", "count"),
)
_ABORTED = declare("sampling/aborted", "groups aborted because enough others had ended", "count")
_LEFT_OUT = declare("data/left_out_{}", "problems of the set {} that its epoch leaves out", "count")
WAIT = declare("time/generate", "waiting for the completions and their rewards", "seconds", STEP_SECONDS)
_FILL = 1.25
"""Completions in the engines per completion that they decode at once: the next ones stand by."""
_GENERATE = declare("ahead/generate", "sampling this step's completions, in the background", "seconds")
_REWARD = declare("ahead/reward", "scoring this step's completions, after the last one had been sampled", "seconds")


@dataclass
class RolloutBatch:
    """One step's completions, the group of each prompt side by side, and the seconds of each phase."""

    completions_B: list[Completion]
    seconds: dict[str, float] = field(default_factory=dict)
    discarded_B: list[Completion] = field(default_factory=list)
    """Members of groups that dynamic sampling left out; they took time and count in the metrics."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Metrics of dynamic sampling and over-sampling; empty if both are off."""


@dataclass(eq=False)
class StepDraw:
    """The problems of one step, and its groups that have ended."""

    version: int
    """At which the trainer trains on them."""
    rounds: list[dict[int, Problem]]
    """By position in the problem stream; one round, or those of dynamic sampling."""
    owed: int
    """The first so many problems of the first round were drawn for an earlier step: they are not aborted."""
    ended: dict[int, dict[int, list[Completion]]] = field(default_factory=dict)
    """Round -> number of a group in it -> its scored completions, in the order in which they ended."""


@dataclass(frozen=True)
class _GroupJob:
    """What is the same for the groups of a round."""

    version: int
    purpose: str
    size: int
    sampling: SamplingParams
    wanted: int
    """Groups after which the others are aborted."""
    owed: int = 0
    """The first so many groups are not."""
    staleness: int = 0

    def choose(self, ended: Iterable[int]) -> list[int]:
        """Return the numbers of the groups to take, ascending, or [] while there are too few. `ended`: numbers as they ended."""
        owed = [number for number in ended if number < self.owed]
        others = [number for number in ended if number >= self.owed][: self.wanted - self.owed]
        return sorted([*owed, *others]) if len(owed) + len(others) == self.wanted else []


class RolloutWorker:
    """Samples and scores completions, on rank 0. `sampler` makes the completions of a group, with environments or agents, if any."""

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        stream: ProblemStream,
        held_out: list[Problem],
        rewards: Scorer,
    ) -> None:
        self._config, self._sampler, self._stream, self._rewards = config, sampler, stream, rewards
        self._held_out = held_out
        self._drawing = threading.Lock()
        self._threads = self._make_threads(config.rollout.group_size)

    def snapshot(self, untrained: Iterable[StepDraw] = ()) -> Callable[[], dict[str, Any]]:
        """Return what makes the state of the problems as if `untrained` had not been drawn; see `ProblemStream`. Sampling needs no state:
        see `derive_seed`."""
        with self._drawing:
            return self._stream.snapshot(position for draw in untrained for problems in draw.rounds for position in problems)

    def draw(self, version: int) -> StepDraw:
        """Draw the problems that the trainer trains on at `version`; steps are in the order of these calls."""
        prompts, extra = self._config.rollout.prompts_per_step, self._config.rollout.over_sampling_prompts
        with self._drawing:
            owed = min(self._stream.left_out_count, prompts)
            problems = self._stream.draw(prompts + (extra if owed < prompts else 0), owed)
        return StepDraw(version, [problems], owed)

    def collect(self, draw: StepDraw) -> RolloutBatch:
        """Sample and score the groups of a step. Several threads may, for several steps; the engines get groups in order of the calls.

        Raise RunError if a token was sampled by another policy version than the step's and the `placement.max_staleness` before it,
        EngineLostError if the engines were lost. `draw` then keeps the groups that had ended, and another call samples the others.

        Dynamic sampling (DAPO, arXiv 2503.14476): a group whose members all earn the same reward teaches nothing, and is replaced by a
        group of the next problem. After the last round such groups fill the batch up to its size. So it is with groups outside of
        `accuracy_low` and `accuracy_high` (PRIME, arXiv 2502.01456), which then train nothing.
        """
        prompts, max_rounds = self._config.rollout.prompts_per_step, self._config.algorithm.dynamic_sampling_max_rounds
        if not max_rounds:
            return self._sample_round(draw, 0)
        group_size, algorithm = self._config.rollout.group_size, self._config.algorithm
        informative, others = list[list[Completion]](), list[list[Completion]]()
        seconds, rounds = dict[str, float](), 0
        while len(informative) < prompts and rounds < max_rounds:
            if rounds == len(draw.rounds):
                with self._drawing:
                    draw.rounds.append(self._stream.draw(prompts - len(informative)))
            rollout = self._sample_round(draw, rounds)
            for start in range(0, len(rollout.completions_B), group_size):
                group = rollout.completions_B[start : start + group_size]
                in_range = algorithm.accuracy_low <= _compute_group_accuracy(group) <= algorithm.accuracy_high
                for member in group:
                    member.masked |= not in_range
                (informative if in_range and _has_reward_spread(group) else others).append(group)
            seconds = {name: seconds.get(name, 0.0) + spent for name, spent in rollout.seconds.items()}
            rounds += 1
        missing = prompts - len(informative)
        return RolloutBatch(
            [member for group in [*informative, *others[:missing]] for member in group],
            seconds,
            [member for group in others[missing:] for member in group],
            dict(zip(_SAMPLING, map(float, (rounds, len(others) - missing, missing)), strict=True)),
        )

    def _sample_round(self, draw: StepDraw, number: int) -> RolloutBatch:
        """Return the groups of a round of dynamic sampling, or of a step without it, with length penalties; aborted ones are given back."""
        problems_P, ended = [*draw.rounds[number].values()], draw.ended.setdefault(number, {})
        wanted = min(len(problems_P), self._config.rollout.prompts_per_step)
        sampling, staleness = self._config.rollout.to_sampling(), self._config.placement.max_staleness
        job = _GroupJob(draw.version, f"train/{number}", self._config.rollout.group_size, sampling, wanted, draw.owed, staleness)
        rollout = self._sample_groups(problems_P, job, ended, self._threads)
        if wanted < len(problems_P):
            rollout.sampling = {_ABORTED: float(self._give_back(draw, {*job.choose(ended)}))}
        algorithm, max_tokens = self._config.algorithm, self._config.rollout.max_new_tokens
        for completion in rollout.completions_B:
            completion.masked = algorithm.mask_truncated_completions and completion.finish_reason == "length"
            completion.length_penalty = compute_overlong_penalty(
                completion.total_sampled, max_tokens, algorithm.overlong_share, algorithm.overlong_penalty
            )
        return rollout

    def _give_back(self, draw: StepDraw, taken: set[int]) -> int:
        """Let a later step draw the problems whose groups are not among `taken`; return how many."""
        kept, aborted = dict[int, Problem](), dict[int, Problem]()
        for number, (position, problem) in enumerate(draw.rounds[0].items()):
            (kept if number in taken else aborted)[position] = problem
        with self._drawing:
            self._stream.give_back(aborted)
            draw.rounds[0] = kept
        return len(aborted)

    def observe(self, rollout: RolloutBatch) -> dict[str, float]:
        """Take the pass rates of a step's groups for the problems to be drawn next; return metrics of what they leave out."""
        size, rates = self._config.rollout.group_size, dict[str, float]()
        for members in (rollout.completions_B, rollout.discarded_B) if self._stream.measures else ():
            for group in (members[start : start + size] for start in range(0, len(members), size)):
                if not all(member.reward.excluded for member in group):
                    rates[group[0].problem.id] = _compute_group_accuracy(group)
        with self._drawing:
            self._stream.observe(rates)
            return {_LEFT_OUT.format(label): float(count) for label, count in self._stream.left_out_by_set.items()}

    def evaluate(self, version: int) -> RolloutBatch:
        """Return `eval.samples` scored completions of every held-out problem, those of one problem side by side."""
        job = _GroupJob(version, "eval", self._config.eval.samples, self._config.to_eval_sampling(), len(self._held_out))
        with self._make_threads(job.size) as threads:  # of its own: groups that are sampled ahead do not keep it waiting
            return self._sample_groups(self._held_out, job, {}, threads)

    def close(self) -> None:
        """Begin no further group."""
        self._sampler.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_threads(self, group_size: int) -> ThreadPoolExecutor:
        """Return as many threads as there are groups in the engines, so that further groups wait here, in order."""
        most = self._config.rollout.engines * self._config.rollout.max_running_requests
        return ThreadPoolExecutor(math.ceil(_FILL * most / group_size), thread_name_prefix="megatron-rl-group")

    def _sample_groups(
        self, problems_P: Sequence[Problem], job: _GroupJob, ended: dict[int, list[Completion]], threads: ThreadPoolExecutor
    ) -> RolloutBatch:
        """Return the groups of the problems, as many as `job` wants. `ended`: groups by number that are there already; those that end are
        added, also if others fail."""
        start = time.perf_counter()
        missing = [] if job.choose(ended) else [number for number in range(len(problems_P)) if number not in ended]
        aborts = {number: Abort() if job.wanted < len(problems_P) else None for number in missing}
        futures = {threads.submit(self._sample_group, problems_P[number], number, job, aborts[number]): number for number in aborts}
        done = SimpleQueue[Future[tuple[list[Completion], float]]]()  # `as_completed` does not hear of groups that `close` cancels
        for future in futures:
            future.add_done_callback(done.put)
        generated, failures, enough = start, list[Exception](), not futures
        for _ in futures:  # all of them: none runs on when this returns
            future = done.get()
            if enough:
                continue
            try:
                ended[futures[future]], ended_at = future.result()
                generated = max(generated, ended_at)
            except Exception as error:  # also that a group was cancelled
                failures.append(error)
            enough = not failures and len(ended) >= job.wanted and bool(job.choose(ended))
            for other, abort in zip(futures, aborts.values(), strict=True) if enough else ():
                if not other.cancel() and abort:
                    abort.request()
        if failures:  # an error of another kind than a loss does not pass
            raise min(failures, key=lambda error: isinstance(error, EngineLostError))
        completions_B = [member for number in job.choose(ended) for member in ended[number]]
        return RolloutBatch(completions_B, {_GENERATE: generated - start, _REWARD: time.perf_counter() - generated})

    def _sample_group(self, problem: Problem, number: int, job: _GroupJob, abort: Abort | None) -> tuple[list[Completion], float]:
        """Return a problem's scored completions, and when they had been generated. Called by the threads of groups."""
        members = range(number * job.size, (number + 1) * job.size)
        samplings = [replace(job.sampling, seed=derive_seed(self._config.train.seed, job.version, job.purpose, index)) for index in members]
        completions = self._sampler.sample([problem] * job.size, samplings, job.version, job.staleness, abort)
        generated = time.perf_counter()
        hang_watchdog.enter_phase("reward")
        assign_rewards(completions, self._rewards)
        return completions, generated


def derive_seed(run: int, version: int, purpose: str, index: int) -> int:
    """Return the sampling seed (63 bits) of one completion: a function of the run's seed, the policy version and the completion's place,
    so that a resumed run samples what the uninterrupted one would have sampled."""
    return int.from_bytes(hashlib.sha256(f"{run}/{version}/{purpose}/{index}".encode()).digest()[:8], "big") >> 1


def assign_rewards(completions_B: Sequence[Completion], rewards: Scorer) -> None:
    """Set each completion's reward; one whose environment or agent failed has no verdict."""
    own_B = [completion.own_reward for completion in completions_B]
    rewards_B = rewards.score(
        [completion.text for completion in completions_B],
        [completion.problem for completion in completions_B],
        [completion.total_sampled for completion in completions_B],
        [completion.environment_error and f"{completion.finish_reason}: {completion.environment_error}" for completion in completions_B],
        *([own_B] if any(own is not None for own in own_B) else []),
    )
    for completion, reward in zip(completions_B, rewards_B, strict=True):
        completion.reward = reward


def _has_reward_spread(group: Sequence[Completion]) -> bool:
    """Return whether the members' rewards differ. Length penalties do not count: they would keep groups that are all wrong."""
    return len({member.reward.value for member in group if not member.reward.excluded}) > 1


def _compute_group_accuracy(group: Sequence[Completion]) -> float:
    """Return the share of correct answers among the members with a verdict; 0 of none."""
    verdicts = [member.reward.correct for member in group if not member.reward.excluded]
    return sum(verdicts) / max(len(verdicts), 1)


def compute_accuracies(completions: Sequence[Completion], overall: str, by_level: str, by_source: str) -> dict[str, float]:
    """Return the share of correct completions, overall and per difficulty level; with several data sets per set, whose levels do not
    compare."""
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
    """Return the metrics of rewards, accuracy, lengths and throughput of all completions sampled in one step."""
    completions = [*rollout.completions_B, *rollout.discarded_B]
    count = len(completions)
    rewards = [completion.reward.value for completion in completions if not completion.reward.excluded] or [0.0]
    lengths = [completion.total_sampled for completion in completions]
    mean = sum(rewards) / len(rewards)
    return {
        _REWARD_MEAN: mean,
        _REWARD_STD: (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        **_reward_parts(completions),
        _REWARD_ERRORS: float(sum(bool(completion.reward.error) for completion in completions)),
        _OVERLONG: sum(completion.length_penalty for completion in completions) / count,
        **compute_accuracies(completions, *_ACCURACIES),
        _LENGTH_MEAN: sum(lengths) / count,
        _LENGTH_MAX: float(max(lengths)),
        _TRUNCATED: sum(completion.finish_reason == "length" for completion in completions) / count,
        _TOKENS: float(sum(lengths)),
        _SPEED: sum(lengths) / rollout.seconds[_GENERATE],
        _CACHED: sum(completion.cached_tokens for completion in completions) / (sum(item.prompt_tokens for item in completions) or 1),
        **(_environment_metrics(completions) if completions[0].calls is None else _agent_metrics(completions)),
        **rollout.seconds,
        **rollout.sampling,
    }


def _reward_parts(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the mean of each reward function over the completions with a verdict; {} if there is only one function."""
    parts = [completion.reward.parts for completion in completions if completion.reward.parts]
    return {_REWARD_PART.format(label): sum(part[label] for part in parts) / len(parts) for label in (parts[0] if parts else {})}


def _environment_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the metrics of turns, and of the environments' tokens and errors; {} without environments."""
    multi_turn = [completion for completion in completions if completion.dialogue]
    if not multi_turn:
        return {}
    tokens = sum(len(completion.output_ids_T) for completion in multi_turn)
    environment_tokens = tokens - sum(completion.sampled_count for completion in multi_turn)
    turns = sum(completion.num_turns for completion in multi_turn) / len(multi_turn)
    tool_errors = float(sum(completion.tool_errors for completion in multi_turn))
    errors = float(sum(bool(completion.environment_error) for completion in multi_turn))
    return dict(zip(_ENVIRONMENT, (turns, environment_tokens / max(tokens, 1), tool_errors, errors), strict=True))


def _agent_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the metrics of agents' requests, conversations and errors."""
    count, conversations = len(completions), [each for completion in completions for each in completion.conversations]
    tokens = sum(len(each.output_ids_T) for each in conversations)
    values = (
        sum(completion.calls or 0 for completion in completions) / count,
        len(conversations) / count,
        1 - sum(each.sampled_count for each in conversations) / max(tokens, 1),
        float(sum(completion.tool_errors for completion in completions)),
        float(sum(bool(completion.environment_error) for completion in completions)),
        float(sum(completion.finish_reason == "turns" for completion in completions)),
    )
    return dict(zip(_AGENT, values, strict=True))


def build_sample_rows(step: int, completions: Sequence[Completion], count: int) -> list[dict[str, Any]]:
    """Return the report's rows of `count` completions, spread evenly over the step's. `versions`: those of the oldest and newest token."""
    return [
        {
            "step": step,
            "problem": completion.problem.id,
            "versions": _find_versions(step - 1, completion),
            "level": completion.problem.level,
            "prompt": completion.problem.prompt,
            "completion": completion.text,
            "answer": completion.problem.answer,
            "reward": completion.reward.value,
            "correct": completion.reward.correct,
            "parts": completion.reward.parts,
            "finish_reason": completion.finish_reason,
            "error": completion.reward.error,
            **({"dialogue": completion.dialogue} if completion.dialogue else {}),
        }
        for completion in select_evenly(completions, count)
    ]


def _find_versions(trained_at: int, completion: Completion) -> list[int]:
    """Return the oldest and the newest policy version that sampled a token, of the completion that the trainer takes at `trained_at`."""
    lags_T = completion.version_lags_T
    return [trained_at] * 2 if lags_T is None or not len(lags_T) else [trained_at - int(lags_T.max()), trained_at - int(lags_T.min())]


def select_evenly(values: Sequence[T], count: int) -> list[T]:
    """Return `count` of the values, or all, spread evenly."""
    count = min(count, len(values))
    return [values[index * len(values) // count] for index in range(count)]
