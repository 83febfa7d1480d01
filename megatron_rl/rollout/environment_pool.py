"""The environments of all answers that are being sampled, in worker processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.rollout.environments.base import Episode, StepResult, load_environment
from megatron_rl.workers.pool import WorkerPool

_log = logging.getLogger(__name__)


class EnvironmentPool(WorkerPool[StepResult]):
    """The environments of all answers that are being sampled, in worker processes. Raise InputError for an unknown name."""

    section, module = "environment", "megatron_rl.rollout.environments.worker"

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self.stop = getattr(load_environment(config.name), "stop", ())
        super().__init__(config.name, config.workers, config.timeout, config.memory_mb)

    def make_failure(self, reason: str) -> StepResult:
        return StepResult(error=reason)

    def step(self, texts_B: Sequence[str], episodes_B: Sequence[Episode]) -> list[StepResult]:
        """Return one reply to each turn. May be called by several threads."""
        replies = self.score(texts_B, episodes_B)
        errors = [reply.error for reply in replies if reply.error]
        if errors:
            _log.warning("environment %s failed in %d of %d answers: %s", self.config.name, len(errors), len(replies), errors[0])
        return replies
