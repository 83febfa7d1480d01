"""DPPO (arXiv 2602.04879): clips by the divergence between the two policies at a token instead of by the ratio.

p and q are the probabilities of the sampled token under the current policy and under the policy that sampled it, at most 1.

loss_t = -stop_gradient(min(p / q, 20)) A logp_t, or 0 if the divergence D exceeds its bound in the direction that A pushes:
p > q and D > clip_high for A > 0, or p < q and D > clip_low for A < 0.

tv   D = |p - q|                                                        total variation of "this token or another"
kl   D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))                  Kullback-Leibler divergence of the same two outcomes

The bound of the weight is from section 5.4. The gradient equals that of -(p / q) A.
"""

import math

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig

_LARGEST_WEIGHT = 20.0


def tv_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses [1, t], tokens beyond the bound bool [1, t]) for D = tv. `logprobs` [1, t] with gradient."""
    now, old = logprobs.detach().clamp(max=0), batch.old_logprobs.clamp(max=0)
    return _mask(logprobs, batch, (now.exp() - old.exp()).abs(), config)


def kl_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `tv_losses` for D = kl."""
    now, old = logprobs.detach().clamp(max=0), batch.old_logprobs.clamp(max=0)
    rest = -torch.expm1(old)
    others = rest * (_log_rest(old) - _log_rest(now))
    divergence = old.exp() * (old - now) + others.masked_fill(rest == 0, 0.0)
    return _mask(logprobs, batch, divergence.masked_fill(now == old, 0.0), config)


def _log_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(logprobs)); -inf for a probability of 1."""
    return torch.log(-torch.expm1(logprobs))


def _mask(
    logprobs: torch.Tensor, batch: MicroBatch, divergence: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    advantage, log_ratio = batch.advantages, logprobs.detach() - batch.old_logprobs
    rising = (advantage > 0) & (log_ratio > 0) & (divergence > config.clip_high)
    falling = (advantage < 0) & (log_ratio < 0) & (divergence > config.clip_low)
    weight = log_ratio.clamp(max=math.log(_LARGEST_WEIGHT)).exp()
    return (-weight * advantage * logprobs).masked_fill(rising | falling, 0.0), rising | falling
