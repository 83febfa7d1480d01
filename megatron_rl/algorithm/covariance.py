"""Selects the tokens with the highest covariance of log-prob and advantage, which lower the policy's entropy most (arXiv 2505.22617).

    cov_t = (old_t - mean(old)) (A_t - mean(A))            means over all sampled tokens of the step

    clip_cov   a share `cov_ratio` of all tokens, at random among those with clip_cov_low <= cov_t <= clip_cov_high
    kl_cov     the share `cov_ratio` of all tokens with the highest cov_t

Tokens are selected once per step over all replicas, from the log-probs before its first update. So the selection does not depend on layout,
micro-batches, or updates per step. Random numbers are a function of version and sample.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_rl.batch.totals import Combine, Totals, combine_alone
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.metrics import declare

COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
_MEAN = declare("covariance/mean", "mean over tokens of the covariance of log-prob and advantage")
_CHOSEN = declare("covariance/chosen", "share of tokens selected for their covariance", "share")
_OLD, _ADVANTAGE = "old log-probs", "advantages of tokens"


def mark_high_covariance(
    samples: list[TrainingSample],
    config: AlgorithmConfig,
    version: int,
    combine: Combine = combine_alone,
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> dict[str, float]:
    """Set `high_covariance` of this replica's samples and return metrics over all replicas, or {} if the loss does not use it.

    Needs old log-probs and advantages. `version` is the policy version; `gather` collects a value from all replicas.
    """
    if config.loss not in COVARIANCE_LOSSES:
        return {}
    learning = [sample for sample in samples if not (sample.excluded or sample.masked)]
    advantages = [sample.advantages.double() for sample in learning]
    totals = Totals()
    for sample, values in zip(learning, advantages, strict=True):
        totals.add(_OLD, sample.old_logprobs)
        totals.add(_ADVANTAGE, values)
    totals = combine(totals)
    wanted = max(int(config.cov_ratio * totals.count(_OLD)), 1)
    scores, outcome = [], Totals()
    for sample, values in zip(learning, advantages, strict=True):
        covariance = (sample.old_logprobs.double() - totals.mean(_OLD)) * (values - totals.mean(_ADVANTAGE))
        outcome.add(_MEAN, covariance)
        scores.append(_score(covariance, config, version, sample.number))
    threshold = _find_threshold(scores, wanted, gather)
    for sample, score in zip(learning, scores, strict=True):
        sample.high_covariance = (score >= threshold) & score.isfinite()
        outcome.add(_CHOSEN, sample.high_covariance)
    outcome = combine(outcome)
    return {name: outcome.mean(name) for name in (_MEAN, _CHOSEN)}


def _score(covariance: torch.Tensor, config: AlgorithmConfig, version: int, number: int) -> torch.Tensor:
    """Return scores, float64 [A]: the highest are selected; -inf excludes a token."""
    if config.loss == "kl_cov":
        return covariance
    drawn = torch.from_numpy(np.random.default_rng([version, number]).random(len(covariance)))
    outside = (covariance < config.clip_cov_low) | (covariance > config.clip_cov_high)
    return drawn.masked_fill(outside, -torch.inf)


def _find_threshold(scores: list[torch.Tensor], wanted: int, gather: Callable[[Any], list[Any]]) -> float:
    """Return the lowest of the `wanted` highest scores of all replicas, or -inf if there are fewer. Replicas send their highest scores."""
    own = torch.cat(scores) if scores else torch.empty(0, dtype=torch.float64)
    highest = torch.cat([torch.from_numpy(part) for part in gather(own.topk(min(wanted, len(own))).values.numpy())])
    return float(highest.topk(wanted).values[-1]) if len(highest) >= wanted else -torch.inf
