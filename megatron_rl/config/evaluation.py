"""The `[eval]` section. See docs/guides/evaluation.md."""

from typing import Self

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.change import EVALUATION, FREELY, Change
from megatron_rl.config.rollout import MinP, TopK, TopP

MOST_SAMPLES = 1024
"""Maximum number of completions per problem. It keeps the binomials of maj@k, up to C(1024, 512), within float64."""


class EvalConfig(ConfigSection):
    """Sampling of held-out problems, during training and by the `eval` command. Fields that are not set default to [rollout]."""

    on_resume = Change(FREELY, EVALUATION)

    samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Number of completions per problem."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. 0 always takes the most probable token."""
    top_p: TopP | None = None
    """See `rollout.top_p`."""
    top_k: TopK | None = None
    """See `rollout.top_k`."""
    min_p: MinP | None = None
    """See `rollout.min_p`."""

    @model_validator(mode="after")
    def _draws_differ(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"the {self.samples} samples of a problem would be identical at temperature 0; set samples = 1")
        return self
