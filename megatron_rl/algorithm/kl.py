"""Estimators of KL(policy || reference) from tokens that the policy sampled (Schulman, http://joschu.net/blog/kl-approx.html).

    d = log p_reference - log p_policy
    k1 = -d                 unbiased, can be negative
    k2 = d^2 / 2            biased, never negative; its gradient is the gradient of the KL
    k3 = exp(d) - d - 1     unbiased, never negative; d at most 10

As a loss, the gradient of k1 has expectation zero, so k1 belongs in the reward.
"""

from collections.abc import Callable

import torch

LARGEST_K3 = 10.0
"""Largest d of k3."""


def k1(difference: torch.Tensor) -> torch.Tensor:
    return -difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    return difference.square() / 2


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Return Schulman's k3, exp(d) - d - 1 for d = log q - log p of samples from p; it estimates KL(p || q) and is never negative.

    d is clamped to `LARGEST_K3`, with gradient 0 beyond: exp(20) would give a gradient of 5e8, and exp(88.8) overflows float32.
    """
    difference = difference.clamp(max=LARGEST_K3)
    return torch.exp(difference) - difference - 1


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Elementwise functions of d by `algorithm.kl_estimator`."""
