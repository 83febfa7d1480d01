"""Probability ratios from differences of log-probs, finite for any difference."""

import torch

LARGEST_LOG_RATIO = 20.0
"""The same bound as in verl. exp(20) is 5e8; exp(88.8) overflows float32, and infinity times 0 is NaN."""


def exp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio) with log_ratio clamped to +-20, elementwise. The gradient is 0 beyond the clamp."""
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
