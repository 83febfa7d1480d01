"""The section `[placement]`: whether engine and trainer share devices, and how far generation may run ahead. Imports without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection


class PlacementConfig(ConfigSection):
    """Where engine and trainer run, and whether they wait for each other. See docs/guides/placement.md."""

    kind: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: on the same devices, in turns; who waits gives its memory back. `disaggregated`: each on devices of its own."""
    max_staleness: int = Field(0, ge=0, le=255)
    """disaggregated: how many policy versions older than the policy that it trains a token may be. 0: generation and training take turns;
    from 1 on, generation goes on while the trainer trains."""

    @model_validator(mode="after")
    def _fits_together(self) -> PlacementConfig:
        if self.max_staleness and self.kind == "colocated":
            raise ValueError('max_staleness above 0 generates while training, which kind "colocated" rules out: set kind "disaggregated"')
        return self
