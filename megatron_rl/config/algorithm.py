"""The section `[algorithm]`: independent pieces, and names that set them together. Formulas and sources are in
docs/reference/algorithms.md.

An algorithm's name is a preset: it gives defaults to other fields, and each of them can still be set by itself.
Imports without torch.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.plugs import ADVANTAGES, LOSSES

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_mean", "aggregate": "constant"},
    "rloo": {"advantage": "leave_one_out", "aggregate": "constant", "kl_estimator": "k1", "kl_in": "reward"},
    "reinforce_pp": {"advantage": "token_std", "kl_estimator": "k2"},
    "dapo": {"clip_high": 0.28, "dynamic_sampling_max_rounds": 10, "overlong_share": 0.2},
    "gspo": {"loss": "gspo", "aggregate": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"loss": "gmpo", "aggregate": "sequence", "clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    "max_rl": {"advantage": "max_rl"},
    "ppo": {"advantage": "gae", "kl_estimator": "k1", "kl_in": "reward"},
    "dppo": {"loss": "dppo_tv"},
}
"""The defaults below that an algorithm's name changes."""

_CORRECTION_DEFAULTS = {
    "geometric_mask": {"correction_low": 0.99, "correction_high": 1.01},
    "sequence_mask": {"correction_low": 0.5, "correction_high": 2.0},
}
"""A mean over tokens varies far less than a single token, so its bounds are tighter."""
_EXCLUSIVE_CORRECTIONS = {
    "weigh tokens, and weights do not multiply": {"tis", "sequence_tis", "icepop"},
    "share correction_low and correction_high": {"icepop", "geometric_mask", "sequence_mask"},
}
GAE = "gae"
Correction = Literal["tis", "sequence_tis", "icepop", "geometric_mask", "sequence_mask", "token_veto"]


def _as_corrections(value: Any) -> Any:
    """Return a tuple of names; a name alone may be given as it is, and "none" for none."""
    names = [value] if isinstance(value, str) else value
    return tuple(name for name in names if name != "none") if isinstance(names, list | tuple) else value


def _check_advantage(name: str) -> str:
    """Those of groups are plugs; `gae` is of tokens, by a critic."""
    return name if name == GAE else ADVANTAGES.check_name(name, GAE)


class AlgorithmConfig(ConfigSection):
    """How rewards become advantages, and log-probs a loss. Every field can be set, whatever the name says."""

    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "gmpo", "cispo", "max_rl", "dppo", "ppo"] = "grpo"
    """The preset; see PRESETS above for what each name sets."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps per rollout; the batch is cut into that many parts."""

    advantage: Annotated[str, AfterValidator(_check_advantage)] = "group_std"
    """Reward less the group's mean, over the group's std (`group_std`), as it is (`group_mean`), against the others' mean
    (`leave_one_out`), whitened over the batch's tokens (`token_std`), over the batch's std (`batch_std`) or over the group's mean
    (`max_rl`, for rewards of 0 or more); or your own as module:attribute. `gae`: of each token, by a critic, see [critic]."""
    gamma: float = Field(1.0, gt=0, le=1)
    """gae: discount of what follows a token."""
    lam: float = Field(1.0, ge=0, le=1)
    """gae: 1 trusts rewards alone (no bias, more variance), 0 the critic alone."""
    advantage_std: Literal["sample", "population"] = "sample"
    """group_std: the squares of n members divided by n - 1, as in verl, slime and TRL; or by n."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several reward functions: advantages of their weighted sum; or the weighted sum of the advantages of each, normalized over the batch
    (GDPO)."""
    loss: Annotated[str, AfterValidator(LOSSES.check_name)] = "ppo"
    """`ppo`: clipped ratio per token. `gspo`: clipped ratio per sequence. `gmpo`: geometric mean of clipped ratios. `cispo`: clipped weight
    that keeps every gradient. `dppo_tv`, `dppo_kl`: bound on how far a probability moves. `clip_cov`, `kl_cov`: spare or restrain
    tokens that lower the entropy most. Or your own as module:attribute."""
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss, for one of your own."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio's lower bound is 1 - clip_low; 1 leaves it open. gmpo: the lower bound of its logarithm is -clip_low. dppo:
    the largest divergence of a token of negative advantage; 0.2 for tv and 0.05 for kl are common."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio's upper bound is 1 + clip_high. gmpo: that of its logarithm is clip_high. dppo: as clip_low, of positive advantage."""
    dual_clip: float | None = Field(None, gt=1)
    """ppo: bounds the loss of a negative advantage A at -dual_clip * A, however large the ratio. Absent: unbounded."""
    calibrate_every: int = Field(0, ge=0)
    """ppo with a quantized trainer: RL steps between calibrations of both bounds against a forward pass without; 0 leaves them as set."""
    cov_ratio: float = Field(2e-4, gt=0, le=1)
    """clip_cov, kl_cov: share of a step's tokens that is chosen by the covariance of log-prob and advantage."""
    clip_cov_low: float = 1.0
    """clip_cov: tokens of a covariance below this are not chosen."""
    clip_cov_high: float = 5.0
    """clip_cov: nor those above this."""
    kl_cov_coef: float = Field(1.0, ge=0)
    """kl_cov: weight of |log p - old log p| of the chosen tokens."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the entropy of the whole distribution at each sampled token, with gradient, is taken from the loss."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Mean over all answer tokens; mean of the sequences' means; or sum over tokens / (sequences * rollout.max_new_tokens)."""

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL estimate against the reference model; 0 runs without a reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per token, d = log p_reference - log p: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1."""
    kl_bias_correction: bool = False
    """kl_in loss: weigh each token's estimate by its ratio p / p_old, with gradient: unbiased for the present policy (DeepSeek-V3.2)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: a term of its own, with gradient. `reward`: taken from a completion's reward, summed over its tokens."""

    off_policy_mask_threshold: float | None = Field(None, gt=0)
    """Drop the policy loss of a completion of negative advantage whose mean of old_logp - logp is above this (DeepSeek-V3.2)."""

    dynamic_sampling_max_rounds: int = Field(0, ge=0)
    """Rounds of sampling to fill the batch with groups whose rewards differ; 0 takes every group."""
    accuracy_low: float = Field(0.0, ge=0, lt=1)
    """Dynamic sampling takes groups whose share of correct answers is at least this."""
    accuracy_high: float = Field(1.0, gt=0, le=1)
    """And at most this. Groups outside that fill the batch after the last round train nothing."""
    mask_truncated_completions: bool = False
    """Answers cut at rollout.max_new_tokens give no gradient; their rewards count in their group."""
    overlong_share: float = Field(0.0, ge=0, lt=1)
    """Last share of rollout.max_new_tokens over which the reward falls with length; 0 turns it off."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Reward that a completion of full length loses."""

    old_policy: Literal["trainer", "engine"] = "trainer"
    """Whose log-probs of the sampled tokens are the ratio's denominator. `engine`: one ratio spans mismatch and update together."""
    correction: Annotated[tuple[Correction, ...], BeforeValidator(_as_corrections)] = ()
    """Weight of a token's loss from q = p_trainer / p_engine, both before the update: `tis`, `sequence_tis`: min(q, cap) of the token or of
    the sequence. `icepop`: q where it lies within the bounds, else 0. `geometric_mask`, `sequence_mask`: 1 where the sequence's geometric
    mean or product of q lies within the bounds, else 0. `token_veto`: 0 for a sequence with any q below `correction_veto`, else 1. Or
    several that fit together, as a list: their product. `none`: 1."""
    correction_cap: float = Field(2.0, gt=1)
    """tis, sequence_tis: the largest weight."""
    correction_low: float = Field(0.5, gt=0, lt=1)
    """icepop, geometric_mask, sequence_mask: the lower bound. geometric_mask: 0.99 where it is not given."""
    correction_high: float = Field(5.0, gt=1)
    """The same: the upper bound. geometric_mask: 1.01 where it is not given; sequence_mask: 2."""
    correction_veto: float = Field(1e-4, gt=0, lt=1)
    """token_veto: the smallest q that a token may have."""

    routing_replay: Literal["none", "trainer", "engine"] = "none"
    """Whose choice of experts the training's forward passes take: each its own; `trainer` (R2): that of the pass that computed the old
    log-probs; `engine` (R3): the engine's when it sampled, in that pass as well. See docs/guides/moe.md."""

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def has_critic(self) -> bool:
        return self.advantage == GAE

    @property
    def has_late_advantages(self) -> bool:
        """Whether advantages wait for log-probs or values."""
        return self.kl_in_reward or self.has_critic

    @model_validator(mode="before")
    @classmethod
    def _presets(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = _as_corrections(fields.get("correction", ()))
        bounds = [_CORRECTION_DEFAULTS.get(str(name), {}) for name in (given if isinstance(given, tuple) else ())]
        return {**PRESETS.get(str(fields.get("name")), {}), **dict(ChainMap(*bounds)), **fields}

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        if self.dual_clip is not None and self.loss != "ppo":
            raise ValueError(f"dual_clip belongs to loss ppo, not to {self.loss}: leave it out")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip ({self.dual_clip}) must be larger than 1 + clip_high ({1 + self.clip_high})")
        if self.kl_bias_correction and (self.kl_in != "loss" or not self.kl_coef):
            raise ValueError("kl_bias_correction weighs the KL term of the loss: set kl_coef, and kl_in loss")
        if self.calibrate_every and (self.loss != "ppo" or self.updates_per_step < 2):
            raise ValueError("calibrate_every needs loss ppo and updates_per_step of 2 or more: before the first update all ratios are 1")
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError(f"clip_cov_low ({self.clip_cov_low}) must be below clip_cov_high ({self.clip_cov_high})")
        if self.accuracy_low >= self.accuracy_high:
            raise ValueError(f"accuracy_low ({self.accuracy_low}) must be below accuracy_high ({self.accuracy_high})")
        if (self.accuracy_low, self.accuracy_high) != (0.0, 1.0) and not self.dynamic_sampling_max_rounds:
            raise ValueError("accuracy_low and accuracy_high choose groups of dynamic sampling: set dynamic_sampling_max_rounds")
        if self.advantage == "max_rl" and self.overlong_share:
            raise ValueError("advantage max_rl needs rewards of 0 or more, and overlong_share takes from them: leave it out")
        if self.kl_in_reward and (self.advantage == "max_rl" or self.multi_objective_aggregation == "normalize_then_sum"):
            raise ValueError("kl_in reward does not fit max_rl and normalize_then_sum, which look at the rewards as given: use kl_in loss")
        if not self.has_critic and (self.gamma, self.lam) != (1.0, 1.0):
            raise ValueError("gamma and lam belong to advantage gae: leave them out")
        if self.has_critic and self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError("normalize_then_sum makes advantages of groups, and gae those of tokens: use sum_then_normalize")
        if self.has_critic and self.loss == "gmpo":
            raise ValueError("loss gmpo has one advantage for a completion, and gae one for each token: use ppo, gspo or cispo")
        if self.correction and self.old_policy == "engine":
            names = " and ".join(self.correction)
            raise ValueError(f"correction {names} needs old_policy trainer: with engine the ratio holds the mismatch already")
        for reason, kinds in _EXCLUSIVE_CORRECTIONS.items():
            if len(several := [name for name in self.correction if name in kinds]) > 1:
                raise ValueError(f"correction {' and '.join(several)} {reason}: keep one of them")
        return self
