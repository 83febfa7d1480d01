"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped and gets no gradient, so every token keeps its gradient.

loss_t = -stop_gradient(clip(rho_t, 1 - low, 1 + high)) A logp_t,    rho_t = exp(logp_t - old_t)
"""

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig


def token_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses [1, t], tokens with a clipped weight bool [1, t]). `logprobs` [1, t] with gradient."""
    ratio = torch.exp(logprobs.detach() - batch.old_logprobs)
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * batch.advantages * logprobs, weight != ratio
