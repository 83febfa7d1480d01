"""Clip-Cov (arXiv 2505.22617, section 4.2): PPO without the gradient of some tokens whose log-prob and advantage are both high, since these
lower the entropy most. `algorithm.covariance` selects them.

loss_t = the loss of `ppo`, or 0 for a selected token
"""

import torch

from megatron_rl.algorithm.losses import ppo
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig


def token_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses [1, t], clipped or selected tokens bool [1, t]). `logprobs` [1, t] with gradient."""
    losses, clipped = ppo.token_losses(logprobs, batch, config)
    chosen = batch.high_covariance > 0
    return losses.masked_fill(chosen, 0.0), clipped | chosen
