"""GSPO (arXiv 2507.18071): one ratio for a whole sequence, the geometric mean of its tokens' ratios.

    s    = exp(mean over the response tokens of (logp_t - old_t)), with the exponent clamped to +-20
    loss = -min(s A, clip(s, 1 - low, 1 + high) A)

Every token of the sequence carries this loss, so `aggregate = "sequence"` gives the paper's mean over sequences. A micro-batch holds whole
sequences, so the mean is complete.

With a correction, tokens have different weights, and the gradient of the mean would spread these over the sequence. Then s becomes
GSPO-token's s_t = stop_gradient(s) p_t / stop_gradient(p_t) (section 4.3), which has the same value but keeps each token's own weight.
"""

import torch

from megatron_rl.algorithm.ratios import exp_log_ratio
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig


def token_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses [1, t], tokens of clipped sequences bool [1, t]). `logprobs` [1, t] with gradient."""
    advantage = batch.advantages
    log_ratio = batch.average_by_sample(logprobs - batch.old_logprobs)
    if config.correction:
        log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
    ratio = exp_log_ratio(log_ratio)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    return loss, (ratio > high) & (advantage > 0) | (ratio < low) & (advantage < 0)
