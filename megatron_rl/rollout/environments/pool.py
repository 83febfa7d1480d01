"""Environments in worker processes. The worker is `python -m megatron_rl.rollout.environments.pool`; any worker can run any turn."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.rollout.environments.base import EnvironmentClass, Episode, Message, StepResult, load_environment
from megatron_rl.workers.pool import WorkerPool
from megatron_rl.workers.process import describe_error, serve

if TYPE_CHECKING:  # a worker does not load pydantic
    from megatron_rl.config.environment import EnvironmentConfig

_log = logging.getLogger(__name__)


class EnvironmentPool(WorkerPool[StepResult]):
    """Runs the environments of all completions in progress. Raise InputError if the environment does not exist."""

    section, module = "environment", "megatron_rl.rollout.environments.pool"

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self.stop = getattr(load_environment(config.name), "stop", ())
        super().__init__(config.name, config.workers, config.timeout, config.memory_mb)

    def make_failure(self, reason: str) -> StepResult:
        return StepResult(error=reason)

    def step(self, texts_B: Sequence[str], episodes_B: Sequence[Episode]) -> list[StepResult]:
        """Return the environment's reply to each turn. Thread-safe."""
        replies = self.run(list(zip(texts_B, episodes_B, strict=True)))
        errors = [reply.error for reply in replies if reply.error]
        if errors:
            _log.warning("environment %s failed in %d of %d completions: %s", self.config.name, len(errors), len(replies), errors[0])
        return replies


def run_step(environment: EnvironmentClass, text: str, episode: Episode) -> StepResult:
    """Return the environment's reply to one turn. An exception or a return value of the wrong type becomes a StepResult with an error."""
    try:
        current = pickle.loads(episode.state) if episode.state else environment(episode)
        message = current.step(text)
        if message is None:
            return StepResult()
        if not isinstance(message, Message):
            raise TypeError(f"step must return a Message or None, not {type(message).__name__}")
        return StepResult(Message(message.text, message.error), state=pickle.dumps(current))
    except BaseException as error:  # as for rewards, no exception may end the worker
        return StepResult(error=describe_error(error))


if __name__ == "__main__":
    serve(lambda name: functools.partial(run_step, load_environment(name)))
