"""The section `[teacher]`: the model that on-policy distillation learns from. Imports without torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megatron_rl.config.base import ConfigSection


class TeacherConfig(ConfigSection):
    """A frozen model in the trainer that scores the policy's own tokens. It may be of another family and size than the policy; it has the
    policy's layout, precision and tokenizer."""

    path: Path
    """Folder of its checkpoint."""
    kl_coef: float = Field(1.0, gt=0)
    """Weight of log p_teacher - log p of each sampled token in its advantage."""
    reward_coef: float = Field(1.0, ge=0)
    """Weight of the advantage that rewards give; 0 distils alone, and rewards are only measured."""
