"""The `[algorithm]` section. Formulas and sources are in docs/reference/algorithms.md.

The name of an algorithm is a preset: it changes the defaults of other fields, and each of them can still be set separately.
"""

from collections import ChainMap
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from megatron_rl.config.base import MAX_COUNT, MAX_STEPS, ConfigSection
from megatron_rl.config.change import FREELY, NAMED, Change
from megatron_rl.plugs import ADVANTAGES, LOSSES

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_mean", "aggregate": "constant"},
    "rloo": {"advantage": "leave_one_out", "aggregate": "constant", "kl_in": "reward"},
    "reinforce_pp": {"advantage": "token_std", "kl_estimator": "k2"},
    "dapo": {"clip_high": 0.28, "dynamic_sampling_max_rounds": 10, "overlong_share": 0.2},
    "gspo": {"loss": "gspo", "aggregate": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"loss": "gmpo", "aggregate": "sequence", "clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    "max_rl": {"advantage": "max_rl"},
    "ppo": {"advantage": "gae", "kl_in": "reward"},
    "dppo": {"loss": "dppo_tv"},
}
"""Defaults that each algorithm name changes."""

_CORRECTION_DEFAULTS = {
    "geometric_mask": {"correction_low": 0.99, "correction_high": 1.01},
    "sequence_mask": {"correction_low": 0.5, "correction_high": 2.0},
}
"""Default bounds by correction. The geometric mean over tokens varies far less than a single token's ratio, so its bounds are tighter."""
_EXCLUSIVE_CORRECTIONS = {
    "all weight tokens, and their weights must not be multiplied": {"tis", "sequence_tis", "icepop"},
    "all use correction_low and correction_high": {"icepop", "geometric_mask", "sequence_mask"},
}
GAE = "gae"
Correction = Literal["tis", "sequence_tis", "icepop", "geometric_mask", "sequence_mask", "token_veto"]


def _as_corrections(value: Any) -> Any:
    """Return a tuple of correction names. A single name may be given as a string, and "none" means no correction."""
    names = [value] if isinstance(value, str) else value
    return tuple(name for name in names if name != "none") if isinstance(names, list | tuple) else value


def _check_advantage(name: str) -> str:
    """Accept `gae`, which is computed by a critic and is therefore not a plug, and the names of plugs."""
    return name if name == GAE else ADVANTAGES.check_name(name, GAE)


_ADVANTAGES = Change(NAMED, "Changes advantages. `gae` cannot be set or left, because a checkpoint has a critic or not.")
_GROUPS = Change(NAMED, "Changes which groups are trained on.")
_REWARDS = Change(NAMED, "Changes rewards.")


class AlgorithmConfig(ConfigSection):
    """How rewards become advantages and log-probs become a loss. Every field can be set, whatever the preset."""

    on_resume = Change(NAMED, "Changes the loss. The reference is kept. Calibrated bounds continue from their values.")

    name: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "gmpo", "cispo", "max_rl", "dppo", "ppo"],
        Change(FREELY, "A preset only sets defaults of other fields, which are compared themselves."),
    ] = "grpo"
    """Preset. `PRESETS` above lists the defaults that each name changes."""
    updates_per_step: Annotated[int, Change(NAMED, "Changes the number of optimizer steps, which the learning rate's schedule counts.")] = (
        Field(1, ge=1, le=MAX_COUNT)
    )
    """Optimizer steps per rollout. The batch is split into this many parts. With 1 and `old_policy = "trainer"`, every ratio is 1, so
    nothing is clipped."""

    advantage: Annotated[str, AfterValidator(_check_advantage), _ADVANTAGES] = "group_std"
    """Advantage estimator. `group_std`: reward minus the group's mean, divided by the group's standard deviation. `group_mean`: reward
    minus the group's mean. `leave_one_out`: reward minus the mean of the other members; unbiased, while `group_mean` is smaller by a factor
    of (n - 1) / n. `token_std`: whitened over the batch's tokens. `batch_std`: divided by the batch's standard deviation. `max_rl`: divided
    by the group's mean, for rewards of 0 or more. `gae`: one advantage per token, computed by a critic (see [critic]). Or your own as
    `module:attribute`."""
    gamma: Annotated[float, _ADVANTAGES] = Field(1.0, gt=0, le=1)
    """Discount factor of `gae`."""
    lam: Annotated[float, _ADVANTAGES] = Field(1.0, ge=0, le=1)
    """Lambda of `gae`. 1 only uses rewards (no bias, high variance); 0 only trusts the critic."""
    advantage_std: Annotated[Literal["sample", "population"], _ADVANTAGES] = "sample"
    """Standard deviation in `group_std`: `sample` divides by n - 1, like verl, slime and TRL; `population` divides by n."""
    multi_objective_aggregation: Annotated[Literal["sum_then_normalize", "normalize_then_sum"], _ADVANTAGES] = "sum_then_normalize"
    """With several reward functions: compute advantages of the weighted sum of rewards, or sum the weighted advantages of each function
    and normalize over the batch (GDPO)."""
    loss: Annotated[str, AfterValidator(LOSSES.check_name)] = "ppo"
    """Policy loss. `ppo`: clipped importance ratio per token. `gspo`: clipped ratio per sequence. `gmpo`: geometric mean of clipped ratios.
    `cispo`: clipped weight that keeps the gradient of every token. `dppo_tv`, `dppo_kl`: limit on the change of a token's probability.
    `clip_cov`, `kl_cov`: exclude or regularize the tokens that reduce entropy most. Or your own as `module:attribute`."""
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a custom loss."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Lower clipping range: the ratio is at least 1 - clip_low, and 1 means no lower bound. `gmpo`: the log ratio is at least -clip_low.
    `dppo`: maximum divergence of a token with a negative advantage; 0.2 for `dppo_tv` and 0.05 for `dppo_kl` are common."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clipping range: the ratio is at most 1 + clip_high. `gmpo`: the log ratio is at most clip_high. `dppo`: maximum divergence of a
    token with a positive advantage."""
    dual_clip: float | None = Field(None, gt=1)
    """Dual-clip PPO: the loss of a negative advantage A is at most -dual_clip * A, however large the ratio. Unbounded by default."""
    calibrate_every: int = Field(0, ge=0, le=MAX_STEPS)
    """RL steps between calibrations of both `ppo` bounds if the trainer quantizes. A calibration compares ratios with those of an
    unquantized forward pass. 0 keeps the bounds as set."""
    cov_ratio: float = Field(2e-4, gt=0, le=1)
    """`clip_cov`, `kl_cov`: fraction of a step's tokens to select by the covariance of log-prob and advantage."""
    clip_cov_low: float = 1.0
    """`clip_cov`: minimum covariance of a selected token."""
    clip_cov_high: float = 5.0
    """`clip_cov`: maximum covariance of a selected token."""
    kl_cov_coef: float = Field(1.0, ge=0)
    """`kl_cov`: weight of |log p - old log p| of the selected tokens. Needs ratios other than 1, like `off_policy_mask_threshold`."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the entropy of the full distribution at each sampled token is subtracted from the loss."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Loss aggregation. `token`: mean over all response tokens. `sequence`: mean of the sequences' token means. `constant`: sum over tokens
    divided by sequences * `rollout.max_new_tokens`, whose scale does not depend on the sampled lengths: the policy gradient."""

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the reference model. With 0, no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator per token. With d = log p_reference - log p: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. On tokens that the policy
    itself sampled, k2 in the loss has the expected gradient of KL(policy || reference), and k3 that of KL(reference || policy). With
    `kl_bias_correction`, k1 and k3 have the former. In the reward, only k1 has the gradient of a KL divergence, and it is the default.
    Other combinations are refused."""
    kl_bias_correction: bool = False
    """Whether to multiply each token's KL estimate (k1 or k3) in the loss by its ratio p / p_old, with gradient. The estimate and its
    gradient are then unbiased for the current policy if p_old sampled the tokens (DeepSeek-V3.2)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: a separate differentiable term, in which a token only counts its own KL. `reward`: the sum over a completion's tokens is
    subtracted from its reward, so a token also counts the KL of later tokens. Not with `group_std`, which would divide kl_coef out of
    groups with equal rewards."""

    off_policy_mask_threshold: float | None = Field(None, gt=0)
    """Mask the policy loss of tokens with a negative advantage in completions whose mean of old_logp - logp exceeds this value
    (DeepSeek-V3.2). A ratio can only differ from 1 with `updates_per_step` above 1 or `old_policy = "engine"`."""

    dynamic_sampling_max_rounds: Annotated[int, _GROUPS] = Field(0, ge=0, le=MAX_COUNT)
    """Maximum number of sampling rounds to fill the batch with groups whose rewards differ. 0 uses all groups."""
    accuracy_low: Annotated[float, _GROUPS] = Field(0.0, ge=0, lt=1)
    """Dynamic sampling: minimum fraction of correct responses in a group."""
    accuracy_high: Annotated[float, _GROUPS] = Field(1.0, gt=0, le=1)
    """Dynamic sampling: maximum fraction of correct responses in a group. Groups outside of the bounds that fill up the batch after the
    last round are not trained on."""
    mask_truncated_completions: bool = False
    """Whether to mask the loss of completions cut off at `rollout.max_new_tokens`. Their rewards still count in their group."""
    overlong_share: Annotated[float, _REWARDS] = Field(0.0, ge=0, lt=1)
    """Final fraction of `rollout.max_new_tokens` over which the reward decreases with length. 0 disables the penalty."""
    overlong_penalty: Annotated[float, _REWARDS] = Field(1.0, gt=0)
    """Reward subtracted from a completion of maximum length. With `normalize_then_sum`, the weight of the normalized penalty."""

    old_policy: Literal["trainer", "engine"] = "trainer"
    """Whose log-probs of the sampled tokens are the denominator of the importance ratio. With `engine`, a single ratio covers both the
    trainer-engine mismatch and the update."""
    old_logprobs: Annotated[
        Literal["auto", "pass", "engine"],
        Change(FREELY, "Changes no result if the mismatch is 0. Otherwise, ratios are against the engine's policy."),
    ] = "auto"
    """Where the old log-probs of a step come from. `pass`: a forward pass before the updates. `engine`: the engine, without a pass; the
    step's first update compares them with the trainer's, and with several updates a pass compares all tokens in one of eight steps.
    `auto`: `engine` if the run promises a mismatch of 0 and no setting needs the pass, otherwise `pass`."""
    correction: Annotated[tuple[Correction, ...], BeforeValidator(_as_corrections)] = ()
    """Corrections of the trainer-engine mismatch, as a name or a list of compatible names whose weights are multiplied. Each weights a
    token's loss by q = p_trainer / p_engine, both before the update. `tis`, `sequence_tis`: min(q, cap) of the token or the sequence;
    below the cap, `sequence_tis` is unbiased, and `tis` leaves the distribution of the preceding tokens the engine's.
    `icepop`: q within the bounds, otherwise 0. `geometric_mask`, `sequence_mask`: 1 if the sequence's geometric mean or product of q is
    within the bounds, otherwise 0. `token_veto`: 0 if any q in the sequence is below `correction_veto`, otherwise 1. `none`: 1."""
    correction_cap: float = Field(2.0, gt=1)
    """`tis`, `sequence_tis`: maximum weight."""
    correction_low: float = Field(0.5, gt=0, lt=1)
    """`icepop`, `geometric_mask`, `sequence_mask`: lower bound. The default for `geometric_mask` is 0.99."""
    correction_high: float = Field(5.0, gt=1)
    """`icepop`, `geometric_mask`, `sequence_mask`: upper bound. The default is 1.01 for `geometric_mask` and 2 for `sequence_mask`."""
    correction_veto: float = Field(1e-4, gt=0, lt=1)
    """`token_veto`: minimum q of a token."""

    routing_replay: Literal["none", "trainer", "engine"] = "none"
    """Whose expert choices the training forward passes use. `none`: each pass chooses, except a step's only update on a GPU, whose weights
    are those of the pass that computed the old log-probs. `trainer` (R2): those of the pass that
    computed the old log-probs. `engine` (R3): those of the engine during sampling, also for the old log-probs. See docs/guides/moe.md."""

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def has_critic(self) -> bool:
        return self.advantage == GAE

    @property
    def has_ratios(self) -> bool:
        """Whether ratios may differ from 1. A step's first update starts from the trainer's own log-probs."""
        return self.updates_per_step > 1 or self.old_policy == "engine"

    @property
    def has_late_advantages(self) -> bool:
        """Whether advantages depend on the trainer's log-probs or values."""
        return self.kl_in_reward or self.has_critic

    @model_validator(mode="before")
    @classmethod
    def _presets(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = _as_corrections(fields.get("correction", ()))
        bounds = [_CORRECTION_DEFAULTS.get(str(name), {}) for name in (given if isinstance(given, tuple) else ())]
        merged = {**PRESETS.get(str(fields.get("name")), {}), **dict(ChainMap(*bounds)), **fields}
        return {**merged, "kl_estimator": "k1", **fields} if merged.get("kl_in") == "reward" else merged

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        preset = PRESETS[self.name]
        for field, (is_used, users) in _USERS.items():
            value, default = getattr(self, field), preset.get(field, type(self).model_fields[field].default)
            if value != default and not is_used(self):
                raise ValueError(f"{field} = {value} has no effect, because it only applies to {users}; leave it out")
        if self.loss == "kl_cov" and not self.has_ratios:
            raise ValueError(f"loss kl_cov only differs from an unclipped loss with {_RATIOS}")
        return self

    @model_validator(mode="after")
    def _kl_has_its_gradient(self) -> Self:
        """Each rule is the expectation of the term's gradient: tests/unit/algorithm/test_expected_gradients.py."""
        kl, in_reward, corrected = self.kl_estimator, self.kl_in == "reward", self.kl_bias_correction
        if in_reward and kl != "k1":
            raise ValueError(f'kl_estimator {kl} in the reward may push away from the reference; use k1, or kl_in = "loss"')
        if not in_reward and kl == "k1" and not corrected:
            raise ValueError('kl_estimator k1 in the loss has a gradient of mean 0; use k2 or k3, kl_bias_correction, or kl_in = "reward"')
        if not in_reward and kl == "k2" and corrected:
            raise ValueError("kl_bias_correction needs an unbiased kl_estimator, and k2 is biased; use k1 or k3, or leave it out")
        if self.kl_in_reward and self.advantage == "group_std":
            rule = "divides by the group's standard deviation, which would divide out kl_coef if rewards are equal"
            raise ValueError(f'advantage group_std {rule}; with kl_in = "reward" use leave_one_out, group_mean, batch_std or token_std')
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip ({self.dual_clip}) must be greater than 1 + clip_high ({1 + self.clip_high})")
        if self.calibrate_every and (self.loss != "ppo" or self.updates_per_step < 2):
            raise ValueError("calibrate_every needs loss ppo and updates_per_step >= 2, because all ratios are 1 before the first update")
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError(f"clip_cov_low ({self.clip_cov_low}) must be less than clip_cov_high ({self.clip_cov_high})")
        if self.accuracy_low >= self.accuracy_high:
            raise ValueError(f"accuracy_low ({self.accuracy_low}) must be less than accuracy_high ({self.accuracy_high})")
        if self.advantage == "max_rl" and self.overlong_share:
            raise ValueError("advantage max_rl needs rewards of 0 or more, and overlong_share subtracts from rewards; leave it out")
        if self.kl_in_reward and (self.advantage == "max_rl" or self.multi_objective_aggregation == "normalize_then_sum"):
            raise ValueError('kl_in = "reward" changes rewards that max_rl and normalize_then_sum need unchanged; use kl_in = "loss"')
        if self.has_critic and self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError("normalize_then_sum needs advantages per group, and gae computes them per token; use sum_then_normalize")
        if self.has_critic and self.loss == "gmpo":
            raise ValueError("loss gmpo needs one advantage per completion, and gae computes one per token; use ppo, gspo or cispo")
        if self.correction and self.old_policy == "engine":
            names = " and ".join(self.correction)
            raise ValueError(f'correction {names} needs old_policy = "trainer", because with "engine" the ratio already has the mismatch')
        for reason, kinds in _EXCLUSIVE_CORRECTIONS.items():
            if len(several := [name for name in self.correction if name in kinds]) > 1:
                raise ValueError(f"corrections {' and '.join(several)} {reason}; keep only one of them")
        return self


def _needs_loss(*names: str) -> Callable[[AlgorithmConfig], bool]:
    """A custom loss may read any field."""
    return lambda config: config.loss in names or ":" in config.loss


def _needs_correction(*names: str) -> Callable[[AlgorithmConfig], bool]:
    return lambda config: bool({*names} & {*config.correction})


def _needs_kl(config: AlgorithmConfig) -> bool:
    """An explicit `kl_coef = 0` turns the term off, and its settings may stay."""
    return config.kl_coef > 0 or "kl_coef" in config.model_fields_set


_RATIOS = 'updates_per_step above 1 or old_policy = "engine"'
_BOUNDED = ("icepop", "geometric_mask", "sequence_mask")
_USERS: dict[str, tuple[Callable[[AlgorithmConfig], bool], str]] = {
    **dict.fromkeys(("gamma", "lam"), (lambda config: config.has_critic, "advantage gae")),
    "advantage_std": (lambda config: config.advantage == "group_std", "advantage group_std"),
    **dict.fromkeys(("clip_low", "clip_high"), (lambda config: config.loss != "kl_cov", "losses other than kl_cov")),
    "dual_clip": (lambda config: config.loss == "ppo" and config.has_ratios, f"loss ppo with {_RATIOS}"),
    "cov_ratio": (_needs_loss("clip_cov", "kl_cov"), "loss clip_cov and kl_cov"),
    **dict.fromkeys(("clip_cov_low", "clip_cov_high"), (_needs_loss("clip_cov"), "loss clip_cov")),
    "kl_cov_coef": (_needs_loss("kl_cov"), "loss kl_cov"),
    "kl_in": (_needs_kl, "kl_coef above 0"),
    "kl_estimator": (lambda config: _needs_kl(config) or config.kl_in == "reward", "kl_coef above 0"),  # k1 is the default in the reward
    "kl_bias_correction": (lambda config: _needs_kl(config) and config.kl_in == "loss", 'kl_coef above 0 with kl_in = "loss"'),
    "off_policy_mask_threshold": (lambda config: config.has_ratios, _RATIOS),
    **dict.fromkeys(("accuracy_low", "accuracy_high"), (lambda config: config.dynamic_sampling_max_rounds > 0, "dynamic sampling")),
    "overlong_penalty": (lambda config: config.overlong_share > 0, "overlong_share above 0"),
    "correction_cap": (_needs_correction("tis", "sequence_tis"), "correction tis and sequence_tis"),
    **dict.fromkeys(("correction_low", "correction_high"), (_needs_correction(*_BOUNDED), f"correction {', '.join(_BOUNDED)}")),
    "correction_veto": (_needs_correction("token_veto"), "correction token_veto"),
}
"""Fields that only some settings use: when, and the rule in words. A value other than the preset's is refused elsewhere."""
