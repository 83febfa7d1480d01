"""The section `[teacher]`: the model that on-policy distillation learns from. Imports without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection


class TeacherConfig(ConfigSection):
    """A frozen model in the trainer that scores the policy's own tokens. It may be of another family and size than the policy; it has the
    policy's layout, precision and tokenizer."""

    path: Path
    """Folder of its checkpoint."""
    kl_coef: float = Field(1.0, gt=0)
    """Weight of the reverse KL of each sampled token, in its advantage or in the loss."""
    kl_in: Literal["advantage", "loss"] = "advantage"
    """`advantage`: log p_teacher - log p, before the step's updates, is added to the token's. `loss`: a term of its own, with gradient."""
    kl_estimator: Literal["k2", "k3"] = "k2"
    """kl_in loss: per token, d = log p_teacher - log p: k2 = d^2 / 2, k3 = exp(d) - d - 1. (The gradient of k1 = -d has mean 0.)"""
    reward_coef: float = Field(1.0, ge=0)
    """Weight of the advantage that rewards give; 0 distils alone, and rewards are only measured."""

    @model_validator(mode="after")
    def _estimates_in_the_loss(self) -> TeacherConfig:
        if self.kl_in != "loss" and self.kl_estimator != "k2":
            raise ValueError("kl_estimator is of the loss, and an advantage has the difference itself: set kl_in loss, or leave it out")
        return self
