"""The policy loss: an objective per token, the weights of aggregation and correction, and a KL term.

    loss = sum over answer tokens of  weight_t (correction_t policy_t + kl_coef kl_t)

It is a sum; the trainer divides by the number of answer tokens of the whole optimizer step. `weight_t` (see `aggregate`) turns that
into any other mean, and is known before the step is cut into micro-batches: the cut changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.algorithm.kl import KL_ESTIMATORS
from megatron_rl.algorithm.losses import cispo, gspo, ppo
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig

TokenLossFunction = Callable[[torch.Tensor, MicroBatch, AlgorithmConfig], tuple[torch.Tensor, torch.Tensor]]
_OBJECTIVES: dict[str, TokenLossFunction] = {"ppo": ppo.token_losses, "gspo": gspo.token_losses, "cispo": cispo.token_losses}


@dataclass(frozen=True)
class PolicyLoss:
    """The loss that the configuration names."""

    config: AlgorithmConfig

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(sum of weighted token losses, sums of metrics). `logprobs` float32 [1, t], with gradient, aligned with `batch.targets`."""
        mask, config = batch.mask, self.config
        logprobs = logprobs.masked_fill(mask == 0, 0.0)  # elsewhere exp() may overflow, and inf * 0 is NaN
        losses, clipped = _OBJECTIVES[config.loss](logprobs, batch, config)
        loss = (losses * batch.importance_weights * batch.loss_weights).sum()
        sums = {"loss/policy": loss.detach(), **_clip_counts(clipped, batch)}
        if config.kl_coef and config.kl_in == "loss":
            kl = (KL_ESTIMATORS[config.kl_estimator](batch.reference_logprobs - logprobs) * batch.loss_weights).sum()
            sums["loss/kl"] = kl.detach()
            loss = loss + config.kl_coef * kl
        return loss, sums


def _clip_counts(clipped: torch.Tensor, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Tokens that the clip touches, by the sign of their advantage; the trainer makes them fractions of all answer tokens."""
    return {
        "clip/positive": (clipped & (batch.advantages > 0)).to(batch.mask.dtype).mul(batch.mask).sum(),
        "clip/negative": (clipped & (batch.advantages < 0)).to(batch.mask.dtype).mul(batch.mask).sum(),
    }
