"""GMPO (arXiv 2507.20673, eq. 4): the geometric mean of a sequence's ratios, each clipped first.

    l_t  = logp_t - old_t;    c_t = min(l_t, clip_high) for A > 0, max(l_t, -clip_low) for A < 0
    loss = -exp(mean over the response tokens of c_t) A

The bounds apply to the logarithm: the paper's clip(rho, e^-0.4, e^0.4) is `clip_low = clip_high = 0.4`. Every token of the sequence carries
this loss, so `aggregate = "sequence"` gives the paper's mean over sequences. A micro-batch holds whole sequences.
"""

import torch

from megatron_rl.algorithm.ratios import exp_log_ratio
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig


def token_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses [1, t], clipped tokens bool [1, t]). `logprobs` [1, t] with gradient."""
    advantage, log_ratio = batch.advantages, logprobs - batch.old_logprobs
    high, low = (log_ratio > config.clip_high) & (advantage > 0), (log_ratio < -config.clip_low) & (advantage < 0)
    bounded = log_ratio.masked_fill(high, config.clip_high).masked_fill(low, -config.clip_low)
    return -exp_log_ratio(batch.average_by_sample(bounded)) * advantage, high | low
