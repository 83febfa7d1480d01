"""Combines the advantages of several reward functions, each normalized separately (GDPO, arXiv 2601.05242, section 3).

    A_i = sum over reward functions k of  weight_k advantage(r_k)_i,    then (A_i - mean) / (std + 1e-6) over the batch

`advantage` is `algorithm.advantage`; with `group_std`, the default, this is GDPO.
"""

from collections.abc import Mapping, Sequence

import torch

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.config.algorithm import AlgorithmConfig

_EPSILON = 1e-6


def normalize_then_sum(
    rewards: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    excluded: Sequence[bool],
    config: AlgorithmConfig,
    group_size: int,
    lengths: Sequence[int] | None = None,
) -> list[float]:
    """Return the advantages of all samples of a step, group after group.

    `rewards` maps each function's label to its rewards of all samples, and `weights` to its weight.
    """
    parts = [weights[label] * _tensor(compute_advantages(rewards[label], excluded, config, group_size, lengths)) for label in rewards]
    total, counted = torch.stack(parts).sum(0), torch.tensor(excluded).logical_not()
    members = counted.sum().clamp(min=1)
    mean = (counted * total).sum() / members
    centered = counted * (total - mean).masked_fill(torch.maximum(total.abs(), mean.abs()) < 1e-12, 0.0)  # rounding errors are not a signal
    std = (centered.square().sum() / members).sqrt()
    return (centered / (std + _EPSILON)).tolist()


def _tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
