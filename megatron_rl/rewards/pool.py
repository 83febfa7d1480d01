"""Reward functions in worker processes: the pool, and the worker (`python -m megatron_rl.rewards.pool`)."""

import json
import math
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.rewards import load_function
from megatron_rl.types import Problem, Reward, RewardFunction
from megatron_rl.workers.pool import WorkerPool
from megatron_rl.workers.process import describe_error, serve

RewardFunctionSpec = tuple[str, Mapping[str, str]]  # name and settings of a reward function, as for `megatron_rl.rewards.load_function`


class RewardPool(WorkerPool[list[Reward]]):
    """Scores completions: every worker runs all `functions` and returns one Reward per function. A function without a verdict gives
    Reward(0.0, False, error). If a worker fails, all functions of the completion have its error."""

    section, module = "reward", "megatron_rl.rewards.pool"

    def __init__(self, functions: Sequence[RewardFunctionSpec], workers: int, timeout: float, memory_mb: int) -> None:
        self._functions = functions
        super().__init__(json.dumps(functions), workers, timeout, memory_mb)

    def make_failure(self, reason: str) -> list[Reward]:
        return [Reward(0.0, False, error=reason)] * len(self._functions)

    def score(self, texts_B: Sequence[str], problems_B: Sequence[Problem]) -> list[list[Reward]]:
        """Return the rewards of the texts, in order. See `WorkerPool.run`."""
        return self.run(list(zip(texts_B, problems_B, strict=True)))


def _load_functions(functions_json: str) -> Callable[[str, Problem], list[Reward]]:
    functions = [load_function(name, settings) for name, settings in json.loads(functions_json)]
    return lambda text, problem: [call_reward_function(function, text, problem) for function in functions]


def call_reward_function(function: RewardFunction, text: str, problem: Problem) -> Reward:
    """Call a reward function. Return a Reward of 0 with an error if it raises or returns an invalid value."""
    try:
        verdict = function(text, problem)
        if not isinstance(verdict, Reward):
            raise TypeError(f"the reward function must return a Reward, not {type(verdict).__name__}")
        if not math.isfinite(verdict.value):
            raise ValueError(f"the reward function returned {verdict.value}")
        answer = None if verdict.answer is None else str(verdict.answer)
        # plain types: the parent unpickles them
        return Reward(float(verdict.value), bool(verdict.correct), str(verdict.error), answer=answer)
    except BaseException as error:  # libraries raise SystemExit and their own BaseExceptions; none may end the worker
        return Reward(0.0, False, error=describe_error(error))


if __name__ == "__main__":
    serve(_load_functions)
