"""The section `[checkpoint]`: what a run leaves behind, and which run goes on. Imports without torch."""

from __future__ import annotations

from pydantic import Field

from megatron_rl.config.base import ConfigSection


class CheckpointConfig(ConfigSection):
    """What a run leaves behind."""

    every: int = Field(0, ge=0)
    """RL steps between checkpoints; 0: one at the end only."""
    keep: int = Field(3, ge=0)
    """The newest checkpoints that stay; 0: all."""
    resume: str = "never"
    """`never`: a new run. `auto`: the newest run under log.dir goes on in its folder unless it is finished; where there is none, a new one.
    Else the folder of the run that goes on, finished or not. See docs/guides/checkpoints.md."""
