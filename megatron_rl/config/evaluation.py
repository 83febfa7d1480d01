"""The section `[eval]`: how held-out problems are answered, during training and by the command `eval`. Imports without torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.rollout import MinP, TopK, TopP

MOST_SAMPLES = 1024
"""Completions per problem for which maj@k stays within float64: binomials up to C(1024, 512)."""


class EvalConfig(ConfigSection):
    """Sampling of held-out problems; what is not given is as in `[rollout]`. See docs/guides/evaluation.md."""

    samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Completions per problem."""
    temperature: float | None = Field(None, ge=0)
    """0: always the most probable token."""
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None

    @model_validator(mode="after")
    def _draws_differ(self) -> EvalConfig:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"asks for {self.samples} samples that temperature 0 makes all the same: set samples to 1")
        return self
