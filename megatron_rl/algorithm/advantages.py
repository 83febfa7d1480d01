"""Advantages of completions from the rewards of their group (the completions of one prompt), one number per completion.

    group_std      (r_i - mean(r)) / (std(r) + 1e-6)                GRPO, arXiv 2402.03300; population std
    group_mean      r_i - mean(r)                                   Dr. GRPO, arXiv 2503.20783
    leave_one_out   r_i - mean of the others' r                     RLOO, arXiv 2402.14740
    batch_std      (r_i - mean(r)) / (std over the batch + 1e-6)    REINFORCE++ with baseline, arXiv 2501.03262; std of r_i - mean(r)

A completion left alone in its group gets 0. With `kl_in = "reward"`, r_i is the completion's reward minus kl_coef times the KL estimate
summed over its tokens. Shape suffixes: `_P` prompts, `_G` members of a group.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_rl.algorithm.kl import KL_ESTIMATORS
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.metrics import declare
from megatron_rl.plugs import ADVANTAGES

_EPSILON = 1e-6
_KL = declare("reward/kl", "KL estimate against the reference per token, taken from the reward", "nats")


class AdvantageFunction(Protocol):
    """What `algorithm.advantage` names."""

    def __call__(self, rewards: torch.Tensor, counted: torch.Tensor, /) -> torch.Tensor:
        """Return float64 [P, G]. `rewards` float64 [P, G]; `counted` bool [P, G], False for an excluded completion, which gets 0 and does
        not count in its group."""


def group_mean(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    return counted * (rewards - (counted * rewards).sum(1, keepdim=True) / _members(counted))


def group_std(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    centered = group_mean(rewards, counted)
    return centered / ((centered.square().sum(1, keepdim=True) / _members(counted)).sqrt() + _EPSILON)


def leave_one_out(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    members = _members(counted)
    return group_mean(rewards, counted) * members / (members - 1).clamp(min=1)  # r - mean of the others' = (r - mean) n / (n - 1)


def batch_std(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    centered = group_mean(rewards, counted)
    return centered / ((centered.square().sum() / counted.sum().clamp(min=1)).sqrt() + _EPSILON)


def _members(counted: torch.Tensor) -> torch.Tensor:
    return counted.sum(1, keepdim=True).clamp(min=1)


def assign_advantages(samples: list[TrainingSample], config: AlgorithmConfig, group_size: int) -> dict[str, float]:
    """Set the advantage of every sample of a step from its reward and return metrics. With `kl_in = "reward"`, old and reference
    log-probs must be set."""
    rewards = [sample.reward for sample in samples]
    metrics = {}
    if config.kl_coef and config.kl_in == "reward":
        estimate = KL_ESTIMATORS[config.kl_estimator]
        kl = [float(estimate(sample.reference_logprobs - sample.old_logprobs).sum()) for sample in samples]
        rewards = [reward - config.kl_coef * value for reward, value in zip(rewards, kl, strict=True)]
        metrics[_KL] = sum(kl) / max(sum(sample.sampled_count for sample in samples), 1)
    counted = torch.tensor([not sample.excluded for sample in samples]).view(-1, group_size)
    compute_advantages: AdvantageFunction = ADVANTAGES.load(config.advantage)
    advantages = compute_advantages(torch.tensor(rewards, dtype=torch.float64).view_as(counted), counted)
    for sample, advantage in zip(samples, advantages.flatten().tolist(), strict=True):
        sample.advantage = advantage
    return metrics
