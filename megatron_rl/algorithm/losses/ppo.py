"""PPO's clipped ratio (arXiv 1707.06347) with separate bounds on each side (DAPO, arXiv 2503.14476) and a dual clip (arXiv 1912.09729).

rho_t  = exp(logp_t - old_t), with the exponent clamped to +-20
loss_t = -min(rho_t A, clip(rho_t, 1 - low, 1 + high) A)
dual clip, A < 0: loss_t = min(loss_t, -c A)
"""

import torch

from megatron_rl.algorithm.ratios import exp_log_ratio
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig


def token_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses [1, t], clipped tokens bool [1, t]). `logprobs` [1, t] with gradient."""
    advantage = batch.advantages
    ratio = exp_log_ratio(logprobs - batch.old_logprobs)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = (ratio > high) & (advantage > 0) | (ratio < low) & (advantage < 0)
    if config.dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -config.dual_clip * advantage), loss)
        clipped = clipped | (ratio > config.dual_clip) & (advantage < 0)
    return loss, clipped
