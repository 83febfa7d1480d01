"""The `[teacher]` section: on-policy distillation."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.change import EQUAL, NAMED, Change


class TeacherConfig(ConfigSection):
    """A frozen teacher model in the trainer that scores the tokens sampled by the policy. It may have another architecture and size, but
    uses the policy's layout, precision and tokenizer."""

    on_resume = Change(NAMED, "Changes advantages or the loss.")

    path: Annotated[Path, Change(EQUAL, "Scores tokens. The hashes of its files are compared.")]
    """Folder of the teacher's checkpoint."""
    kl_coef: float = Field(1.0, gt=0)
    """Weight of each sampled token's KL divergence from the teacher, which is subtracted from its advantage or added to the loss."""
    kl_in: Literal["advantage", "loss"] = "advantage"
    """`advantage`: add log p_teacher - log p, computed before the step's updates, to each token's advantage. `loss`: add a separate
    differentiable loss term."""
    kl_estimator: Literal["k2", "k3"] = "k2"
    """KL estimator per token for `kl_in = "loss"`. With d = log p_teacher - log p: k2 = d^2 / 2, whose expected gradient is that of
    KL(policy || teacher), as with `kl_in = "advantage"`; k3 = exp(d) - d - 1, whose expected gradient is that of KL(teacher || policy). The
    estimator k1 = -d is not offered, because its gradient has mean 0."""
    reward_coef: float = Field(1.0, ge=0)
    """Weight of the advantage computed from rewards. With 0, the run only distills, and rewards are measured but not trained on."""

    @model_validator(mode="after")
    def _estimates_in_the_loss(self) -> Self:
        if self.kl_in != "loss" and self.kl_estimator != "k2":
            raise ValueError('kl_estimator only applies to kl_in = "loss"; set kl_in = "loss", or leave kl_estimator out')
        return self
