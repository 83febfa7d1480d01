"""Advantages of completions from the rewards of their group (the completions of one prompt), one number per completion.

    group_std      (r_i - mean(r)) / (std(r) + 1e-6)                GRPO, arXiv 2402.03300; population std
    group_mean      r_i - mean(r)                                   Dr. GRPO, arXiv 2503.20783
    leave_one_out   r_i - mean of the others' r                     RLOO, arXiv 2402.14740
    batch_std      (r_i - mean(r)) / (std over the batch + 1e-6)    REINFORCE++ with baseline, arXiv 2501.03262; std of r_i - mean(r)

With `kl_in = "reward"`, r_i is the completion's reward minus kl_coef times the KL estimate summed over its tokens.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithm.kl import KL_ESTIMATORS
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig

_EPSILON = 1e-6


def compute_advantages(rewards: list[float], group_size: int, kind: str = "group_std", excluded: list[bool] | None = None) -> list[float]:
    """Return one advantage per completion, for rewards ordered in groups of `group_size`. Equal rewards in a group give zeros.

    An `excluded` completion gets 0 and does not count in its group; a completion left alone in its group gets 0.
    """
    r = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    counted = torch.ones_like(r) if excluded is None else 1 - torch.tensor(excluded, dtype=r.dtype).view_as(r)
    members = counted.sum(1, keepdim=True).clamp(min=1)
    centered = counted * (r - (counted * r).sum(1, keepdim=True) / members)
    if kind == "group_std":
        centered = centered / ((centered.square().sum(1, keepdim=True) / members).sqrt() + _EPSILON)
    elif kind == "leave_one_out":
        centered = centered * members / (members - 1).clamp(min=1)  # r - mean of the others' = (r - mean) n / (n - 1)
    elif kind == "batch_std":
        centered = centered / ((centered.square().sum() / counted.sum().clamp(min=1)).sqrt() + _EPSILON)
    return centered.flatten().tolist()


def assign_advantages(samples: list[TrainingSample], config: AlgorithmConfig, group_size: int) -> dict[str, float]:
    """Set the advantage of every sample of a step from its reward and return metrics. With `kl_in = "reward"`, old and reference
    log-probs must be set."""
    rewards = [sample.reward for sample in samples]
    metrics = {}
    if config.kl_coef and config.kl_in == "reward":
        kl = [_summed_kl(sample, config.kl_estimator) for sample in samples]
        rewards = [reward - config.kl_coef * value for reward, value in zip(rewards, kl, strict=True)]
        metrics["reward/kl"] = sum(kl) / max(sum(sample.sampled_count for sample in samples), 1)
    excluded = [sample.excluded for sample in samples]
    for sample, advantage in zip(samples, compute_advantages(rewards, group_size, config.advantage, excluded), strict=True):
        sample.advantage = advantage
    return metrics


def _summed_kl(sample: TrainingSample, estimator: str) -> float:
    return float(KL_ESTIMATORS[estimator](sample.reference_logprobs - sample.old_logprobs).sum())
