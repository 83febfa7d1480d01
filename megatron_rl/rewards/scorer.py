"""Reward of a completion: a weighted sum of functions.

    in worker processes   functions that run code on a completion: math, patterns, your own functions   (pool.py)
    on a server           functions named `http`                                                         (http.py)
    in this process       length

If any function fails on a completion, the completion has no verdict, since a sum without one of its terms would be a wrong reward.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_rl.config.reward import RewardConfig, RewardFunctionConfig
from megatron_rl.errors import RunError, UserError
from megatron_rl.plugs import REWARDS
from megatron_rl.rewards.foreign import DOES_NOT_APPLY, Sample
from megatron_rl.rewards.http import HttpRewardClient
from megatron_rl.rewards.pool import RewardFunctionSpec, RewardPool
from megatron_rl.rewards.thinking import Response, ThoughtMarkers, find_markers, split_thought
from megatron_rl.types import Problem, Reward
from megatron_rl.workers.pool import START_TIMEOUT
from megatron_rl.workers.trial import find_failure

_MOST_REASONS = 3


class Scorer:
    """Scores completions as configured. A context manager that owns the worker processes; entering starts them without waiting for them.
    `notify` receives how many completions of a call got no verdict, and why. `chat_template` is the tokenizer's, for `reward.thinking`."""

    def __init__(self, config: RewardConfig, notify: Callable[[str], None], chat_template: str | Mapping[str, str] | None = None) -> None:
        self._thinking = _find_thinking(config, chat_template)
        self._config, self._notify, self._parts, self._judges = config, notify, config.parts, config.judges
        self._local = [label for label, part in self._parts.items() if part.name not in ("http", "length")]
        self._pool = RewardPool(
            [_function(self._parts[label], self._thinking) for label in self._local], config.workers, config.timeout, config.memory_mb
        )
        self._servers = {label: HttpRewardClient(part) for label, part in self._parts.items() if part.name == "http"}

    def __enter__(self) -> Scorer:
        if self._local:
            self._pool.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def score(
        self,
        texts_B: Sequence[str],
        problems_B: Sequence[Problem],
        lengths_B: Sequence[int],
        broken_B: Sequence[str] | None = None,
        own_B: Sequence[float | None] | None = None,
        samples_B: Sequence[Sample] | None = None,
    ) -> list[Reward]:
        """Return the rewards of completions in order, with `parts` if there are several functions. Thread-safe.

        A completion without a verdict has an `error` and is treated as `reward.on_error` says. Raise RunError if `reward.on_error` is
        `stop`, or if workers cannot be started.

        Args:
            texts_B: The completions.
            lengths_B: Their lengths in tokens.
            broken_B: Why a completion can have no verdict, or "".
            own_B: Rewards that agents gave themselves, used instead of all functions. Correct if above 0.
            samples_B: What functions of other libraries may ask about the completions.
        """
        if own_B is None:
            rewards_B = self.judge(texts_B, problems_B, lengths_B, samples_B)
        else:
            rewards_B = [Reward(value or 0.0, (value or 0.0) > 0) for value in own_B]
        for number, error in enumerate(broken_B or ()):
            if error:
                rewards_B[number] = Reward(0.0, False, error=error)
        return self.settle(rewards_B, problems_B)

    def split(self, text: str, problem: Problem) -> Response:
        """Return a completion's answer, which is what built-in functions judge, and its thought."""
        return split_thought(text, problem.prompt, self._thinking)

    def judge(
        self, texts_B: Sequence[str], problems_B: Sequence[Problem], lengths_B: Sequence[int], samples_B: Sequence[Sample] | None
    ) -> list[Reward]:
        """Return the verdicts of the functions, as `score` without `reward.on_error`."""
        if not any(REWARDS.is_own(self._parts[label].name) for label in self._local):
            samples_B = None
        verdicts_B: list[dict[str, Reward]] = [{} for _ in texts_B]
        if self._local:
            for verdicts, rewards in zip(verdicts_B, self._pool.score(texts_B, problems_B, samples_B), strict=True):
                verdicts.update(zip(self._local, rewards, strict=True))
        for label, server in self._servers.items():
            for verdicts, reward in zip(verdicts_B, server.score(texts_B, problems_B), strict=True):
                verdicts[label] = reward
        return [self._sum(verdicts, length) for verdicts, length in zip(verdicts_B, lengths_B, strict=True)]

    def _sum(self, verdicts: Mapping[str, Reward], tokens: int) -> Reward:
        verdicts = {label: verdict for label, verdict in verdicts.items() if verdict.error != DOES_NOT_APPLY} or verdicts
        if errors := {label: verdict.error for label, verdict in verdicts.items() if verdict.error}:
            error = next(iter(errors.values()))
            labels = [label for label in errors if errors[label] == error]
            return Reward(0.0, False, error=error if len(self._parts) == 1 else f"{', '.join(labels)}: {error}")
        judge = verdicts[next(label for label in self._judges if label in verdicts)]
        values = {
            label: judge.correct * compute_length_reward(tokens, part.full_tokens, part.zero_tokens)
            if part.name == "length"
            else verdicts[label].value
            for label, part in self._parts.items()
            if part.name == "length" or label in verdicts
        }
        total = sum(self._parts[label].weight * value for label, value in values.items())
        return Reward(total, judge.correct, parts=values if len(self._parts) > 1 else {}, answer=judge.answer)

    def settle(self, rewards: list[Reward], problems_B: Sequence[Problem]) -> list[Reward]:
        """Report the completions without a verdict, and treat them as `reward.on_error` says."""
        failed = [number for number, reward in enumerate(rewards) if reward.error]
        if not failed:
            return rewards
        reasons = Counter(rewards[number].error for number in failed).most_common()
        listed = "; ".join(f"{error} ({count})" for error, count in reasons[:_MOST_REASONS])
        more = f"; and {len(reasons) - _MOST_REASONS} other reasons" if len(reasons) > _MOST_REASONS else ""
        self._notify(f"{len(failed)} of {len(rewards)} completions got no verdict: {listed}{more}")
        if self._config.on_error == "stop":
            problem, error = problems_B[failed[0]], rewards[failed[0]].error
            raise RunError(f"a completion of problem {problem.id} got no verdict ({error}), and reward.on_error is stop")
        exclude = self._config.on_error == "exclude"
        return [replace(reward, excluded=exclude) if reward.error else reward for reward in rewards]


def compute_length_reward(tokens: int, full: int, zero: int) -> float:
    """Return clip((zero - tokens) / (zero - full), 0, 1): 1 up to `full` tokens, 0 from `zero` tokens on, linear in between. LCPO-Max
    (arXiv 2503.04697) gives this to correct answers, with full, zero = target -+ 0.5 / alpha."""
    return min(max((zero - tokens) / (zero - full), 0.0), 1.0)


def check_rewards(config: RewardConfig, problems: Sequence[Problem] = ()) -> None:
    """Check before a run that the user's own functions load in a worker within its limits, and that these functions and servers judge a
    completion of the first problem of each set. Raise UserError if not. Built-in functions need no check."""
    field = "reward.functions" if config.functions else "reward.function"
    for part in config.parts.values():
        if part.name == "http":
            _check_server(part, problems)
        elif REWARDS.is_own(part.name):
            with RewardPool([_function(part, None)], 1, config.timeout, config.memory_mb) as pool:
                _check_own(pool, field, part.name, problems, DOES_NOT_APPLY if len(config.parts) > 1 else "")


def _check_server(part: RewardFunctionConfig, problems: Sequence[Problem]) -> None:
    client = HttpRewardClient(part.model_copy(update={"timeout": max(part.timeout, START_TIMEOUT), "retries": 0}))
    if failure := find_failure(lambda text, problem: client.score([text], [problem])[0].error, problems):
        fix = "start the server, or correct the address, the token, or the server"
        raise UserError("reward.functions.url", part.url, f"the reward server {failure}", fix)


def _check_own(pool: RewardPool, field: str, name: str, problems: Sequence[Problem], allowed: str) -> None:
    """`allowed`: an error that is none."""

    def call(text: str, problem: Problem) -> str:
        error = pool.score([text], [problem], [Sample(array("i", [*text.encode(errors="replace")]).tobytes())])[0][0].error
        return "" if error == allowed else error

    try:
        pool.wait_until_ready()
        failure, fix = find_failure(call, problems), "correct it"
    except RunError as error:
        failure, fix = str(error), "the function is searched on Python's path and in the working directory"
        reason = failure.partition(" could not load its functions: ")[2]
        if reason and not reason.startswith("cannot be imported"):
            failure, fix = reason, "see docs/guides/rewards.md"
    if failure:
        raise UserError(field, name, failure, fix)


def check_verdicts(rewards_B: Sequence[Reward], config: RewardConfig) -> None:
    """Raise RunError if no completion has a verdict, or if more than `reward.max_error_share` of them have none."""
    errors = Counter(reward.error for reward in rewards_B if reward.error)
    failed, total = errors.total(), len(rewards_B)
    if failed and (failed == total or failed > config.max_error_share * total):
        allowed = "" if failed == total else f", and reward.max_error_share is {config.max_error_share:g}"
        ((error, count),) = errors.most_common(1)
        reason = " ".join(error.split())
        raise RunError(f"{failed} of {total} completions got no verdict{allowed}; the most frequent reason: {reason} ({count})")


def _find_thinking(config: RewardConfig, chat_template: str | Mapping[str, str] | None) -> ThoughtMarkers | None:
    if config.thinking == "none":
        return None
    return find_markers(chat_template) if config.thinking == "auto" else config.thinking


def _function(part: RewardFunctionConfig, thinking: ThoughtMarkers | None) -> RewardFunctionSpec:
    settings = {"thinking": thinking} if part.name in ("math", "exact") else part.settings
    return part.name, settings | ({"pattern": part.pattern} if part.pattern else {})
