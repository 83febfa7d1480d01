"""Reward functions in worker processes: the pool, and the worker (`python -m megatron_rl.rewards.pool`)."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.rewards import load_function
from megatron_rl.rewards.foreign import ForeignFunction, Sample, make_reward
from megatron_rl.types import Problem, Reward, RewardFunction
from megatron_rl.workers.pool import WorkerPool
from megatron_rl.workers.process import describe_error, serve

RewardFunctionSpec = tuple[str, Mapping[str, Any]]  # name and settings of a reward function, as for `megatron_rl.rewards.load_function`


class RewardPool(WorkerPool[list[Reward]]):
    """Scores completions: every worker runs all `functions` and returns one Reward per function. A function without a verdict gives
    Reward(0.0, False, error). If a worker fails, all functions of the completion have its error."""

    section, module = "reward", "megatron_rl.rewards.pool"
    answer_type = list[tuple[float, bool, str, str | None]]  # value, correct, error and answer of each function

    def __init__(self, functions: Sequence[RewardFunctionSpec], workers: int, timeout: float, memory_mb: int) -> None:
        self._functions = functions
        super().__init__(json.dumps(functions), workers, timeout, memory_mb)

    def make_result(self, answer: Any) -> list[Reward]:
        if answer is None or len(answer) != len(self._functions):
            raise ValueError("not one verdict per function")
        return [Reward(value, correct, error, answer=text) for value, correct, error, text in answer]

    def make_failure(self, reason: str) -> list[Reward]:
        return [Reward(0.0, False, error=reason)] * len(self._functions)

    def find_kind(self, text: str, problem: Problem, sample: Sample) -> object:
        """Return the data set, since functions of several sets, as verl's, load something for each."""
        return problem.source, problem.columns.get("data_source")

    def score(self, texts_B: Sequence[str], problems_B: Sequence[Problem], samples_B: Sequence[Sample] | None = None) -> list[list[Reward]]:
        """Return the rewards of the texts, in order. See `WorkerPool.run`."""
        return self.run(list(zip(texts_B, problems_B, samples_B or [Sample()] * len(texts_B), strict=True)))


def _load_functions(functions_json: str) -> Callable[[str, Problem, Sample], object]:
    functions = [load_function(name, settings) for name, settings in json.loads(functions_json)]

    def judge(text: str, problem: Problem, sample: Sample) -> object:
        rewards = [call_reward_function(function, text, problem, sample) for function in functions]
        return [(reward.value, reward.correct, reward.error, reward.answer) for reward in rewards]

    return judge


def call_reward_function(
    function: RewardFunction | ForeignFunction,
    text: str,
    problem: Problem,
    sample: Sample = Sample(),  # noqa: B008 (it is frozen)
) -> Reward:
    """Call a reward function, which may also return a number. Return a Reward of 0 with an error if it raises or returns anything else."""
    try:
        verdict = function(text, problem, sample) if isinstance(function, ForeignFunction) else function(text, problem)
        if not isinstance(verdict, Reward):
            verdict = make_reward(verdict)
        if not math.isfinite(verdict.value):
            raise ValueError(f"the reward function returned {verdict.value}")
        answer = None if verdict.answer is None else _clean(verdict.answer)
        return Reward(float(verdict.value), bool(verdict.correct), _clean(verdict.error), answer=answer)
    except BaseException as error:  # libraries raise SystemExit and their own BaseExceptions; none may end the worker
        return Reward(0.0, False, error=describe_error(error))


def _clean(text: object) -> str:
    """Return a text without lone surrogates, which no file can hold."""
    return str(text).encode(errors="replace").decode()


if __name__ == "__main__":
    serve(_load_functions, Problem, Sample)
