"""The section `[critic]`: the model that predicts returns, for `algorithm.advantage = "gae"`. Imports without torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.train import TrainConfig


class CriticConfig(ConfigSection):
    """The critic: a second model of the policy's architecture with a value head. Layout, precision, micro-batches and all that is not
    here are those of [train] and [precision]; its optimizer steps are as many as the policy's (`algorithm.updates_per_step`)."""

    path: Path | None = None
    """Folder of a checkpoint of the policy's architecture; absent: model.path. Its `score.weight` [1, hidden] is the value head, which
    otherwise starts at 0."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of Adam. It falls as the policy's does, to the same share of its peak."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of a linear warm-up."""
    critic_warmup: int = Field(0, ge=0)
    """RL steps at the run's start in which the critic alone learns."""
    cliprange_value: float = Field(0.5, gt=0)
    """The value loss of a token does not fall further where a step has moved its value by more than this, in units of the reward."""

    def to_train(self, train: TrainConfig) -> TrainConfig:
        """Return [train] with the critic's optimizer."""
        lowest = train.min_learning_rate * self.learning_rate / train.learning_rate
        changes = {"learning_rate": self.learning_rate, "min_learning_rate": lowest, "warmup_steps": self.warmup_steps}
        return train.model_copy(update=changes)
