"""The policy loss: a loss per token, weighted for aggregation and correction, plus KL terms and minus an entropy bonus.

    loss = sum over response tokens of  weight_t (correction_t policy_t + kl_coef kl_t - entropy_coef entropy_t)

kl_t is the KL estimate against the reference. A teacher with `kl_in = "loss"` adds its own term.

The trainer divides this sum by the number of response tokens of the whole optimizer step. `weight_t` (see `loss_weights`) turns the result
into any other mean. It is set before the step is cut into micro-batches, so the cut does not change the loss.
"""

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from megatron_rl.algorithm.kl import KL_ESTIMATORS
from megatron_rl.algorithm.ratios import exp_log_ratio
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.teacher import TeacherConfig
from megatron_rl.metrics import declare
from megatron_rl.plugs import LOSSES

_POLICY = declare("loss/policy", "policy loss", "small", "policy loss", label="policy loss")
_KL = declare("loss/kl", "KL term against the reference model", "nats", "KL term", label="KL")
_TEACHER_KL = declare("loss/teacher_kl", "KL term against the teacher", "nats", "KL term", label="KL to the teacher")
_ENTROPY = declare("loss/entropy", "entropy that the bonus rewards, during the step's updates", "nats")
_DROPPED = declare(
    "mask/off_policy",
    "share of tokens of negative advantage dropped as off-policy",
    "share",
    "tokens clipped",
    label="dropped as off-policy",
)
_CLIPPED = declare(
    "clip/{}",
    "share of tokens that the clip touches, {} advantage",
    "share",
    "tokens clipped",
    label="{} advantage",
    expected=(0.0, 0.3),
    causes=("", "too many or too large updates per step, or bounds too narrow: cispo caps at 1 + clip_high, TRL's epsilon_high is the cap"),
)


class TokenLossFunction(Protocol):
    """The interface of a policy loss (`algorithm.loss`)."""

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig, /, **settings: Any) -> tuple[torch.Tensor, ...]:
        """Return (losses, clipped): losses [1, t] with gradient, in the log-probs' dtype, and the clipped tokens, bool [1, t].

        Args:
            logprobs: of the current policy, float32 [1, t] with gradient; 0 if `batch.mask` is 0.
            settings: `algorithm.loss_settings`.
        """


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of a config, with the teacher's term if `teacher` is given."""

    config: AlgorithmConfig
    teacher: TeacherConfig | None = None

    @cached_property
    def _token_losses(self) -> TokenLossFunction:
        loss: TokenLossFunction = LOSSES.load(self.config.loss)
        return loss

    @property
    def with_entropy(self) -> bool:
        """Whether the loss must be called with entropies."""
        return self.config.entropy_coef > 0

    def __call__(
        self, logprobs: torch.Tensor, batch: MicroBatch, entropies: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (sum of weighted token losses, sums of metrics).

        `logprobs`, and `entropies` if `with_entropy`, are float32 [1, t] with gradient, aligned with `batch.targets`.
        """
        mask, config = batch.mask, self.config
        logprobs = logprobs.masked_fill(mask == 0, 0.0)  # masked positions could overflow exp(), and inf * 0 is NaN
        losses, clipped = self._compute_token_losses(logprobs, batch)
        sums: dict[str, torch.Tensor] = {}
        if config.off_policy_mask_threshold is not None:
            dropped = self._find_off_policy(logprobs.detach(), batch, config.off_policy_mask_threshold)
            losses = losses.masked_fill(dropped, 0.0)
            sums[_DROPPED] = dropped.to(mask.dtype).mul(mask).sum()
        loss = (losses * batch.importance_weights * batch.loss_weights).sum()
        sums[_POLICY] = loss.detach()
        for name, of_sign in (("positive", batch.advantages > 0), ("negative", batch.advantages < 0)):
            sums[_CLIPPED.format(name)] = (clipped & of_sign).to(mask.dtype).mul(mask).sum()  # the trainer divides by the number of tokens
        if config.kl_coef and config.kl_in == "loss":
            estimates = KL_ESTIMATORS[config.kl_estimator](batch.reference_logprobs - logprobs)
            if config.kl_bias_correction:
                estimates = exp_log_ratio(logprobs - batch.old_logprobs) * estimates
            kl = (estimates * batch.loss_weights).sum()
            sums[_KL] = kl.detach()
            loss = loss + config.kl_coef * kl
        if self.teacher is not None and self.teacher.kl_in == "loss":
            kl = (KL_ESTIMATORS[self.teacher.kl_estimator](batch.teacher_logprobs - logprobs) * batch.loss_weights).sum()
            sums[_TEACHER_KL] = kl.detach()
            loss = loss + self.teacher.kl_coef * kl
        if entropies is not None:
            entropy = (entropies * batch.loss_weights).sum()
            sums[_ENTROPY] = entropy.detach()
            loss = loss - config.entropy_coef * entropy
        return loss, sums

    def _compute_token_losses(self, logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Return (losses, clipped). Raise PlugError for whatever a loss of the user's own does. It may fail on one rank alone."""
        if self.config.loss in LOSSES.builtin:
            return self._token_losses(logprobs, batch, self.config, **self.config.loss_settings)
        with LOSSES.call(self.config.loss):
            return call_own_loss(self._token_losses, logprobs, batch, self.config)

    def _find_off_policy(self, logprobs: torch.Tensor, batch: MicroBatch, threshold: float) -> torch.Tensor:
        """Return bool [1, t], True for tokens of off-policy sequences as in DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).

        A sequence is off-policy if A < 0 and the mean of old_logp - logp over its response tokens exceeds `threshold`.
        """
        return (batch.average_by_sample(batch.old_logprobs - logprobs) > threshold) & (batch.advantages < 0)


def call_own_loss(
    loss: TokenLossFunction, logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses, clipped) of a loss. Raise ValueError if it returns something else, or changes what it was given. Values are not
    checked here, because that would wait for a GPU: the trainer refuses a loss or a gradient that is not finite."""
    given = {"logprobs": logprobs} | {f"batch.{name}": value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    versions = {name: tensor._version for name, tensor in given.items()}  # each operation in place increments it
    result = loss(logprobs, replace(batch, lengths=[*batch.lengths]), config, **copy.deepcopy(config.loss_settings))
    if not isinstance(result, tuple | list) or len(result) != 2 or not all(isinstance(each, torch.Tensor) for each in result):
        raise ValueError(f"must return the two tensors (losses, clipped), not {type(result).__name__}")
    losses, clipped = result
    if (losses.shape, losses.dtype) != (logprobs.shape, logprobs.dtype) or (clipped.shape, clipped.dtype) != (logprobs.shape, torch.bool):
        raise ValueError("must return (losses, clipped) of the log-probs' shape: losses in their dtype, clipped as bool")
    if losses.device != logprobs.device or clipped.device != logprobs.device:
        raise ValueError(f"must return tensors on {logprobs.device}")
    if logprobs.requires_grad and not losses.requires_grad:
        raise ValueError("must return losses with a gradient")
    if changed := [name for name, tensor in given.items() if tensor._version != versions[name]]:
        raise ValueError(f"must not change {', '.join(changed)} in place")
    return losses, clipped
