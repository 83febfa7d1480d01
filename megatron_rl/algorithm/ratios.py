"""Ratios of probabilities from differences of log-probs, finite whatever the difference."""

from __future__ import annotations

import torch

LARGEST_LOG_RATIO = 20.0
"""As verl bounds it: exp(20) is 5e8, where no policy is near any more; beyond 88.7 float32 is infinite, and infinity times 0 is NaN."""


def exp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio clamped to +-20), elementwise; beyond, the gradient is 0."""
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
