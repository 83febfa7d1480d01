"""The section `[replay]`: groups that are trained on again. Imports without torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection


class ReplayConfig(ConfigSection):
    """Groups whose rewards differ are kept, and later steps train on them again, beside the groups that they sample. Off without the
    section. See docs/guides/replay.md."""

    prompts_per_step: int = Field(ge=1)
    """Kept groups that a step trains on, at most, beside its own `rollout.prompts_per_step`."""
    max_staleness: int = Field(4, ge=1, le=255)
    """Policy versions between a group's oldest token and the trainer, after which it is forgotten."""
    max_replays: int = Field(1, ge=1)
    """How often a group is trained on again."""
    buffer_size: int = Field(256, ge=1)
    """Groups kept, on rank 0, at most: beyond that the oldest are forgotten."""

    @model_validator(mode="after")
    def _fits_together(self) -> ReplayConfig:
        if self.buffer_size < self.prompts_per_step:
            raise ValueError(f"buffer_size ({self.buffer_size}) must not be below prompts_per_step ({self.prompts_per_step})")
        return self
