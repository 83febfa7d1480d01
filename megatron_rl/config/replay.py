"""The `[replay]` section. See docs/guides/replay.md."""

from typing import Self

from pydantic import Field, model_validator

from megatron_rl.config.base import MAX_COUNT, ConfigSection
from megatron_rl.config.change import NAMED, Change


class ReplayConfig(ConfigSection):
    """Replay buffer for groups with different rewards. Later steps train on them again, in addition to newly sampled groups. Replay is
    disabled if this section is absent."""

    on_resume = Change(NAMED, "Changes which groups are replayed. The buffer stays.")

    prompts_per_step: int = Field(ge=1, le=MAX_COUNT)
    """Maximum number of replayed groups per step, in addition to the step's own `rollout.prompts_per_step`."""
    max_staleness: int = Field(4, ge=1, le=255)
    """Maximum age of a group's oldest token in policy versions. Older groups are discarded."""
    max_replays: int = Field(1, ge=1, le=MAX_COUNT)
    """Maximum number of times that a group is replayed."""
    buffer_size: int = Field(256, ge=1, le=MAX_COUNT)
    """Maximum number of groups in the buffer, which is kept on rank 0. The oldest groups are discarded first."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.buffer_size < self.prompts_per_step:
            raise ValueError(f"buffer_size ({self.buffer_size}) must not be less than prompts_per_step ({self.prompts_per_step})")
        return self
