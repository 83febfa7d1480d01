"""The `[critic]` section, used by `algorithm.advantage = "gae"`."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_rl.config.base import MAX_STEPS, ConfigSection
from megatron_rl.config.change import EQUAL, NAMED, Change
from megatron_rl.config.train import TrainConfig


class CriticConfig(ConfigSection):
    """The critic: a second model of the policy's architecture with a value head. All settings that are not listed here, such as layout,
    precision and micro-batches, come from [train] and [precision]. It takes as many optimizer steps as the policy."""

    on_resume = Change(NAMED, "Changes the critic's steps. Its moments are kept.")

    path: Annotated[Path | None, Change(EQUAL, "Imported FP8 blocks are read from it. The hashes of its files are compared.")] = None
    """Checkpoint folder of a model of the policy's architecture. Defaults to `model.path`. The value head is loaded from `score.weight`
    ([1, hidden]) if the checkpoint has this tensor, and starts at 0 otherwise."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of Adam. It decays like the policy's learning rate, to the same fraction of its peak."""
    warmup_steps: int = Field(0, ge=0, le=MAX_STEPS)
    """Optimizer steps of linear learning-rate warm-up."""
    critic_warmup: int = Field(0, ge=0, le=MAX_STEPS)
    """RL steps at the start of the run in which only the critic is trained."""
    cliprange_value: float = Field(0.5, gt=0)
    """Value clipping range in units of the reward. A token's value loss stops decreasing once an RL step has moved its value further, which
    can only happen with `algorithm.updates_per_step` above 1."""

    def to_train(self, train: TrainConfig) -> TrainConfig:
        """Return `train` with the critic's optimizer settings."""
        lowest = train.min_learning_rate * self.learning_rate / train.learning_rate
        changes = {"learning_rate": self.learning_rate, "min_learning_rate": lowest, "warmup_steps": self.warmup_steps}
        return train.model_copy(update=changes)
