"""Advantages of PPO with a critic, per token: generalized advantage estimation (GAE, arXiv 1506.02438).

    delta_t = r_t + gamma V_(t+1) - V_t      A_t = delta_t + gamma lam A_(t+1)      R_t = A_t + V_t

V_t is the critic's value of the sequence before sampled token t, and R_t the return that the critic learns to predict; both are 0 after the
last token. Tokens written by an environment are skipped. r_t is the completion's reward at the last token and 0 before; with
`kl_in = "reward"`, kl_coef times each token's KL estimate is subtracted. A response that was cut at `rollout.max_new_tokens` ends there:
nothing is bootstrapped (as in verl and TRL).

A is then whitened over the step's trained tokens: (A - m) / sqrt(v + 1e-8), with v the sample variance. All numbers are float64. Sums run
over samples in the order of the step, so the bits do not depend on which replica has which sample.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from megatron_rl.algorithm.kl import KL_ESTIMATORS
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.metrics import declare

KL = declare("reward/kl", "KL estimate against the reference per token, subtracted from the reward", "nats")
_EXPLAINED = declare(
    "critic/explained_variance",
    "1 - variance of (return - value) / variance of the return, over the step's tokens, before the critic's update",
    "number",
    "explained variance of returns",
    label="explained",
)
_MEANS = (
    declare("critic/values_mean", "mean of the critic's values before its update", "number", "values and returns", label="values"),
    declare("critic/returns_mean", "mean return", "number", "values and returns", label="returns"),
)

SumSamples = Callable[[torch.Tensor], torch.Tensor]
"""Sums rows float64 [own samples, k] over all replicas, in the order of the step, to [k]; collective (`passes.reduce.sum_samples`)."""


def sum_alone(rows: torch.Tensor) -> torch.Tensor:
    """`SumSamples` of a single replica."""
    return rows.sum(0)


def estimate_advantages(
    rewards: torch.Tensor, values: torch.Tensor, lengths: Sequence[int], gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) of concatenated samples of `lengths` tokens each; all float64 [sum of lengths].

    A sample's result has the same bits as if it were computed alone.
    """
    counts = torch.tensor(lengths, dtype=torch.long)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    ends = counts.cumsum(0)
    following = torch.cat([values[1:], values[:1]])
    following[ends[counts > 0] - 1] = 0.0
    longest = max(lengths, default=0)
    steps = torch.arange(len(values)) + longest - ends[owner]  # all samples end at the last step
    deltas = values.new_zeros(longest, len(lengths))
    deltas[steps, owner] = rewards + gamma * following - values
    for step in range(longest - 2, -1, -1):
        deltas[step] += gamma * lam * deltas[step + 1]
    advantages = deltas[steps, owner]
    return advantages, advantages + values


def compute_token_rewards(sample: TrainingSample, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (r, the KL estimates subtracted from it) of a sample's tokens, float64 [A] each."""
    kl = torch.zeros(sample.sampled_count, dtype=torch.float64)
    if config.kl_in_reward:
        kl = KL_ESTIMATORS[config.kl_estimator](sample.reference_logprobs - sample.old_logprobs).double()
    rewards = -config.kl_coef * kl
    rewards[-1:] += sample.reward
    return rewards, kl


def assign_token_advantages(
    samples: list[TrainingSample], config: AlgorithmConfig, sum_samples: SumSamples = sum_alone
) -> dict[str, float]:
    """Set advantages and `returns` of this replica's samples from their `values`, and return metrics over all replicas. Collective.

    Needs old and reference log-probs if the KL term is part of the reward. Samples without weight in the loss (excluded or masked) get
    advantages of 0 and do not count.
    """
    lengths = [sample.sampled_count for sample in samples]
    parts = [compute_token_rewards(sample, config) for sample in samples]
    rewards, kl = _join(rewards for rewards, _ in parts), _join(kl for _, kl in parts)
    values = _join(sample.values for sample in samples)
    advantages, returns = estimate_advantages(rewards, values, lengths, config.gamma, config.lam)

    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    counted = torch.tensor([sample.loss_weight > 0 for sample in samples], dtype=torch.float64)[owner]

    def add_up(*columns: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(len(samples), len(columns), dtype=torch.float64)
        return sum_samples(rows.index_add_(0, owner, torch.stack(columns, -1) * counted.unsqueeze(-1)))

    measured = advantages, returns, values, returns - values
    tokens, *sums = add_up(torch.ones_like(values), *measured, kl)
    tokens = tokens.clamp(min=1)
    *means, mean_kl = (total / tokens for total in sums)
    squares = add_up(*((column - mean).square() for column, mean in zip(measured, means, strict=True)))
    of_advantages, of_returns, _, of_errors = (squares / (tokens - 1).clamp(min=1)).tolist()
    whitened = counted * (advantages - means[0]) / (of_advantages + 1e-8) ** 0.5

    for sample, own, of_sample in zip(samples, whitened.float().split(lengths), returns.float().split(lengths), strict=True):
        sample.token_advantages, sample.returns = own, of_sample
        sample.advantage = float(own.mean()) if len(own) else 0.0
    metrics = dict(zip(_MEANS, (float(means[2]), float(means[1])), strict=True))
    if of_returns > 0:
        metrics[_EXPLAINED] = 1 - of_errors / of_returns
    return metrics | ({KL: float(mean_kl)} if config.kl_in_reward else {})


def _join(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(part.double() for part in parts)])
