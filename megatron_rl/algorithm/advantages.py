"""Computes advantages, one number per completion, from the rewards of its group (the completions of one prompt).

    group_std      (r_i - mean(r)) / (std(r) + 1e-6)                GRPO, arXiv 2402.03300; `advantage_std`
    group_mean      r_i - mean(r)                                   Dr. GRPO, arXiv 2503.20783
    leave_one_out   r_i - mean(r of the others)                     RLOO, arXiv 2402.14740
    token_std      (c_i - m) / sqrt(v + 1e-8), c_i = r_i - mean(r)  REINFORCE++ with baseline, arXiv 2501.03262, as its authors compute it
    batch_std      (r_i - mean(r)) / (std over the batch + 1e-6)    the same, but each completion counts once
    max_rl         (r_i - mean(r)) / mean(r), 0 if all are 0        MaxRL, arXiv 2602.02710

m and v are the mean and sample variance of c over all tokens, so a completion counts as often as it has tokens. Groups with equal rewards
(`types.are_equal`), and groups with a single counted completion, get exactly 0 (c_i = 0 in token_std). With `kl_in = "reward"`, r_i is the
reward minus kl_coef times the KL estimate summed over the completion's tokens. Shape suffixes: `_P` prompts, `_G` members of a group.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megatron_rl.algorithm.kl import KL_ESTIMATORS
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import RunError, as_run_error
from megatron_rl.plugs import ADVANTAGES
from megatron_rl.types import EQUAL_REWARDS

_EPSILON = 1e-6


class AdvantageFunction(Protocol):
    """The interface of an advantage function (`algorithm.advantage`)."""

    def __call__(self, rewards: torch.Tensor, counted: torch.Tensor, /, **settings: Any) -> torch.Tensor:
        """Return the advantages, float64 [P, G].

        Args:
            rewards: float64 [P, G].
            counted: bool [P, G], False for an excluded completion, which gets 0 and does not count in its group.
            settings: passed to built-in functions only.
        """


def group_mean(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    centered = counted * (rewards - (counted * rewards).sum(1, keepdim=True) / _members(counted))
    largest = rewards.masked_fill(~counted, -torch.inf).amax(1, keepdim=True)
    smallest = rewards.masked_fill(~counted, torch.inf).amin(1, keepdim=True)
    scale = EQUAL_REWARDS * torch.maximum(largest.abs(), smallest.abs()).clamp(min=1)
    return centered.masked_fill(largest - smallest <= scale, 0.0)  # a rounding error divided by a standard deviation would be a signal


def group_std(rewards: torch.Tensor, counted: torch.Tensor, std: str = "sample") -> torch.Tensor:
    """Divide by the standard deviation: `std` is "sample" (members - 1) or "population" (members)."""
    centered, members = group_mean(rewards, counted), _members(counted)
    divisor = (members - 1).clamp(min=1) if std == "sample" else members
    return centered / ((centered.square().sum(1, keepdim=True) / divisor).sqrt() + _EPSILON)


def leave_one_out(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    members = _members(counted)
    return group_mean(rewards, counted) * members / (members - 1).clamp(min=1)  # r - mean(r of the others) = (r - mean) n / (n - 1)


def batch_std(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    centered = group_mean(rewards, counted)
    return centered / ((centered.square().sum() / counted.sum().clamp(min=1)).sqrt() + _EPSILON)


def token_std(rewards: torch.Tensor, counted: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Normalize over tokens. `lengths` are the sampled tokens of each completion, float64 [P, G]; 1 by default."""
    centered, tokens = group_mean(rewards, counted), counted * (torch.ones_like(rewards) if lengths is None else lengths)
    total = tokens.sum().clamp(min=1)
    shifted = centered - (tokens * centered).sum() / total
    variance = (tokens * shifted.square()).sum() / (total - 1).clamp(min=1)
    return counted * shifted / (variance + 1e-8).sqrt()


def max_rl(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Divide by the group's mean. Raise RunError for a negative reward: the mean must be a share of correct answers."""
    if (rewards * counted < 0).any():
        raise RunError("a reward is below 0, but algorithm.advantage = max_rl divides by the group's mean and needs rewards of 0 or more")
    means = (counted * rewards).sum(1, keepdim=True) / _members(counted)
    return group_mean(rewards, counted) / means.masked_fill(means == 0, 1.0)


def _members(counted: torch.Tensor) -> torch.Tensor:
    return counted.sum(1, keepdim=True).clamp(min=1)


def compute_advantages(
    rewards: Sequence[float], excluded: Sequence[bool], config: AlgorithmConfig, group_size: int, lengths: Sequence[int] | None = None
) -> list[float]:
    """Return the advantages of all completions of a step, group after group. `lengths` are their sampled tokens, used by token_std.
    Raise RunError for whatever a function of the user's own does."""
    counted = torch.tensor(excluded).logical_not().view(-1, group_size)
    advantages: AdvantageFunction = ADVANTAGES.load(config.advantage)
    settings: dict[str, Any] = {}
    if config.advantage == "group_std":
        settings = {"std": config.advantage_std}
    elif config.advantage == "token_std" and lengths is not None:
        settings = {"lengths": torch.tensor(lengths, dtype=torch.float64).view_as(counted)}
    rewards_PG = torch.tensor(rewards, dtype=torch.float64).view_as(counted)
    if config.advantage in ADVANTAGES.builtin:
        return advantages(rewards_PG, counted, **settings).flatten().tolist()
    with as_run_error(), ADVANTAGES.call(config.advantage):
        return call_own_advantage(advantages, rewards_PG, counted).flatten().tolist()


def call_own_advantage(advantages: AdvantageFunction, rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the advantages of copies of the arguments. Raise ValueError if the function returns something else than advantages."""
    returned = advantages(rewards.clone(), counted.clone())
    is_tensor = isinstance(returned, torch.Tensor) and returned.is_floating_point() and returned.shape == rewards.shape
    if not is_tensor or not returned.isfinite().all() or returned.cpu()[~counted].any():
        raise ValueError("must return finite values of the rewards' shape, and 0 if counted is False")
    return returned.detach()


def measure_kl(sample: TrainingSample, config: AlgorithmConfig) -> float:
    """Return the KL estimate summed over a sample's tokens. Needs old and reference log-probs."""
    return float(KL_ESTIMATORS[config.kl_estimator](sample.reference_logprobs - sample.old_logprobs).sum())
