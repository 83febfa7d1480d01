"""Environments in worker processes. The worker is `python -m megatron_rl.rollout.environments.pool`; any worker can run any turn."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import RunError, UserError
from megatron_rl.rollout.environments.base import EnvironmentClass, Message, StepResult, load_environment, takes_stop
from megatron_rl.types import Episode, Problem
from megatron_rl.workers.pool import WorkerPool
from megatron_rl.workers.process import describe_error, seed_libraries, serve
from megatron_rl.workers.trial import find_failure

if TYPE_CHECKING:  # a worker does not load pydantic
    from megatron_rl.config.environment import EnvironmentConfig

_log = logging.getLogger(__name__)


class EnvironmentPool(WorkerPool[StepResult]):
    """Runs the environments of all completions in progress. Raise InputError if the environment does not exist."""

    section, module = "environment", "megatron_rl.rollout.environments.pool"
    answer_type = tuple[tuple[str, str, str] | None, str, bytes]  # fields of the message, error of the environment, state

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self.stop = getattr(load_environment(config.name), "stop", ())
        super().__init__(config.name, config.workers, config.timeout, config.memory_mb)

    def make_result(self, answer: Any) -> StepResult:
        if answer is None:
            raise ValueError("no reply")
        message, error, state = answer
        return StepResult(message and Message(*message), error, state)

    def make_failure(self, reason: str) -> StepResult:
        return StepResult(error=reason)

    def step(self, turns_B: Sequence[tuple[str, str]], episodes_B: Sequence[Episode]) -> list[StepResult]:
        """Return the environment's reply to each turn, which is a text and the stop text that ended it, or "". Thread-safe."""
        replies = self.run(list(zip(turns_B, episodes_B, strict=True)))
        errors = [reply.error for reply in replies if reply.error]
        if errors:
            _log.warning("environment %s failed in %d of %d completions: %s", self.config.name, len(errors), len(replies), errors[0])
        return replies


def check_environment(config: EnvironmentConfig, problems: Sequence[Problem], chat: bool) -> None:
    """Take two turns of the environment on the first problem of each set, since it is unpickled for the second. Raise UserError if they
    fail, whatever the policy says. `chat`: whether messages may have roles."""
    with EnvironmentPool(config.model_copy(update={"workers": 1})) as pool:
        stop = "".join(pool.stop[:1])

        def call(text: str, problem: Problem) -> str:
            turn, episode = (text + stop, stop), Episode(**vars(problem))
            (reply,) = pool.run([(turn, episode)])
            if reply.message and reply.message.role and not chat:
                return f"its message has the role {reply.message.role}, which needs data.chat = true"
            if reply.message:
                (reply,) = pool.run([(turn, replace(episode, turn=1, state=reply.state))])
            return reply.error

        try:
            failure = find_failure(call, problems)
        except RunError as error:
            failure = str(error)
    if failure:
        raise UserError("environment.name", config.name, failure, "correct it; see docs/guides/environments.md")


def run_step(environment: EnvironmentClass, turn: tuple[str, str], episode: Episode) -> StepResult:
    """Return the environment's reply to one turn. An exception or a return value of the wrong type becomes a StepResult with an error."""
    try:
        seed_libraries(episode.seed, episode.turn)  # in every turn, because any worker can run any turn
        current = pickle.loads(episode.state) if episode.state else environment(episode)
        arguments = turn if takes_stop(environment) else turn[:1]
        message = current.step(*arguments)
        if message is not None and not isinstance(message, Message):
            raise TypeError(f"step must return a Message or None, not {type(message).__name__}")
        state = pickle.dumps(current)  # also if no turn follows, so that an environment that cannot be pickled fails on its first turn
        return StepResult() if message is None else StepResult(Message(message.text, message.error, message.role), state=state)
    except BaseException as error:  # as for rewards, no exception may end the worker
        return StepResult(error=describe_error(error))


def _answer_step(environment: EnvironmentClass, turn: tuple[str, str], episode: Episode) -> object:
    """Return the result of a step as JSON values and bytes. The state stays bytes: only workers unpickle it."""
    result = run_step(environment, turn, episode)
    return result.message and tuple(vars(result.message).values()), result.error, result.state


if __name__ == "__main__":
    serve(lambda name: functools.partial(_answer_step, load_environment(name)), Episode)
