"""GRPO (DeepSeekMath, arXiv 2402.03300): advantages relative to the group, PPO's clipped ratio, optional KL to a reference.

    A_i    = (r_i - mean(r)) / (std(r) + 1e-6)                     over one prompt's completions, population std
    rho_t  = exp(logp_t - old_t)
    loss_t = -min(rho_t A, clip(rho_t, 1 - low, 1 + high) A) + kl_coef * k3_t
    k3_t   = exp(ref_t - logp_t) - (ref_t - logp_t) - 1             (Schulman's k3 estimate of KL(policy || reference))

`loss` returns sums over tokens; the trainer divides by the number of answer tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.batch import MicroBatch
from megatron_rl.config import Algorithm

_EPSILON = 1e-6


def advantages(rewards_G: list[float]) -> list[float]:
    """One advantage per member of a group; all zero when every member earned the same."""
    rewards = torch.tensor(rewards_G, dtype=torch.float64)
    return ((rewards - rewards.mean()) / (rewards.std(correction=0) + _EPSILON)).tolist()


@dataclass(frozen=True)
class GRPOLoss:
    """The policy loss with the bounds and weights of the configuration."""

    config: Algorithm

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(sum of token losses, sums of metrics). `logprobs` float32 [b, s], with gradient, aligned with `batch.targets`."""
        mask, advantage = batch.mask, batch.advantages
        logprobs = logprobs.masked_fill(mask == 0, 0.0)  # elsewhere exp() may overflow, and inf * 0 is NaN
        ratio = torch.exp(logprobs - batch.old_logprobs)
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        policy = -torch.minimum(ratio * advantage, clipped * advantage)
        loss = (policy * mask).sum()
        sums = {"loss/policy": loss.detach(), **self._clip_counts(ratio.detach(), advantage, mask)}
        if self.config.kl_coef:
            kl = (k3(batch.reference_logprobs - logprobs) * mask).sum()
            sums["loss/kl"] = kl.detach()
            loss = loss + self.config.kl_coef * kl
        return loss, sums

    def _clip_counts(self, ratio: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tokens whose gradient the clip removes, by the sign of their advantage, as fractions of all answer tokens."""
        too_high = (ratio > 1 + self.config.clip_high) & (advantage > 0)
        too_low = (ratio < 1 - self.config.clip_low) & (advantage < 0)
        return {"clip/positive": (too_high * mask).sum(), "clip/negative": (too_low * mask).sum()}


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3: exp(d) - d - 1 for d = log q - log p of samples from p; estimates KL(p || q), never negative."""
    return torch.exp(difference) - difference - 1
