"""The `[placement]` section. See docs/guides/placement.md."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.change import FREELY, NAMED, Change


class PlacementConfig(ConfigSection):
    """Whether the engines and the trainer share devices, and how far generation may run ahead of training."""

    kind: Annotated[Literal["colocated", "disaggregated"], Change(FREELY, "Only decides who holds memory when.")] = "colocated"
    """`colocated`: engines and trainer take turns on the same devices, and the idle side releases its memory. `disaggregated`: they have
    separate devices."""
    max_staleness: Annotated[int, Change(NAMED, "Changes the age of the tokens that are trained on.")] = Field(0, ge=0, le=255)
    """Maximum age of a token in policy versions when it is trained on. With 0, generation and training take turns. Values above 0 need
    `disaggregated`: generation then continues while the trainer trains."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_staleness and self.kind == "colocated":
            raise ValueError('max_staleness above 0 generates during training and needs kind = "disaggregated"')
        return self
