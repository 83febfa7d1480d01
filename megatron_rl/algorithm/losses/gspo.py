"""GSPO (arXiv 2507.18071): one ratio for a whole sequence, the geometric mean of its tokens' ratios.

    s      = exp(mean over the response tokens of (logp_t - old_t)), with the exponent clamped to +-20
    s_t    = stop_gradient(s) p_t / stop_gradient(p_t)
    loss_t = -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)

This is the paper's GSPO-token (section 4.3). s_t has the value of s, and if all tokens have the same advantage and weight, the loss has the
gradient of GSPO. If they differ (a critic, a teacher, a correction), the gradient of s would spread each token's part over the sequence.
`aggregate = "sequence"` gives the paper's mean over sequences. A micro-batch holds whole sequences, so the mean is complete.
"""

import torch

from megatron_rl.algorithm.ratios import exp_log_ratio
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig


def token_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses [1, t], tokens of clipped sequences bool [1, t]). `logprobs` [1, t] with gradient."""
    advantage = batch.advantages
    log_ratio = batch.average_by_sample(logprobs.detach() - batch.old_logprobs)
    ratio = exp_log_ratio(log_ratio + (logprobs - logprobs.detach()))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    return loss, (ratio > high) & (advantage > 0) | (ratio < low) & (advantage < 0)
