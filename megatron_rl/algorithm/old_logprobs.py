"""Whose log-probs of a step's tokens are the old ones: those of a forward pass before the updates, or the engine's.

In a run that promises a mismatch of 0, both are the same bits, so the pass is needed only for its other results. Without it, the first
update of the step compares its own log-probs with the engine's before it changes a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_rl.config import Config

if TYPE_CHECKING:  # preflight checks run without torch
    from megatron_rl.batch.training_sample import TrainingSample

PASS_EVERY = 8
"""With several updates per step, the first compares its own tokens only. In one of this many steps, a pass compares all of them."""

NEEDS_PASS: dict[str, Callable[[Config], bool]] = {
    "a critic trains before the policy's first update": lambda config: config.algorithm.has_critic,
    "[replay] trains on tokens of older policy versions": lambda config: config.replay is not None,
    "algorithm.routing_replay = trainer replays the experts of the pass": lambda config: config.algorithm.routing_replay == "trainer",
    "algorithm.correction weights tokens by the trainer's log-probs": lambda config: bool(config.algorithm.correction),
}
"""Settings that need more of the pass than log-probs equal to the engine's. All else that uses old log-probs (ratios, KL terms in loss and
reward, a teacher's advantages, covariances) reads the engine's. Entropy and router statistics come from the first update."""


def list_needs(config: Config) -> list[str]:
    """Return why the settings of a run need the pass. Empty if they do not."""
    return [reason for reason, applies in NEEDS_PASS.items() if applies(config)]


class OldLogprobs:
    """Decides in each step. `exact`: whether the run promises a mismatch of 0."""

    def __init__(self, config: Config, exact: bool) -> None:
        chosen = config.algorithm.old_logprobs
        self._never = chosen == "pass" or (chosen == "auto" and (not exact or bool(list_needs(config))))
        self._updates, self._attribute_every = config.algorithm.updates_per_step, config.log.attribute_every

    def are_engines(self, samples: list[TrainingSample], version: int, max_over_replicas: Callable[[int], int]) -> bool:
        """Return whether the step from `version` to the next leaves out the pass. Collective: `samples` are this replica's. A step with
        tokens of older policy versions needs it, because the engine's log-probs are then not those of the trainer's weights."""
        if self._never or (self._attribute_every and (version + 1) % self._attribute_every == 0):
            return False
        if self._updates > 1 and version % PASS_EVERY == 0:
            return False
        return not max_over_replicas(any(bool(sample.version_lags.any()) for sample in samples))
