"""Estimates of KL(policy || reference) from tokens that the policy sampled (Schulman, http://joschu.net/blog/kl-approx.html).

    d = log p_reference - log p_policy
    k1 = -d                 unbiased, of either sign
    k2 = d^2 / 2            biased, never negative; its gradient is that of the KL
    k3 = exp(d) - d - 1     unbiased, never negative; d at most 10

As a loss, the gradient of k1 has expectation zero, so k1 belongs in the reward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LARGEST_K3 = 10.0
"""Largest d of k3."""


def k1(difference: torch.Tensor) -> torch.Tensor:
    return -difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    return difference.square() / 2


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3: exp(d) - d - 1 for d = log q - log p of samples from p; estimates KL(p || q), never negative.

    Beyond `LARGEST_K3` d counts as that, with gradient 0: exp(20) would be a gradient of 5e8, and beyond 88.7 infinite. Below there is no
    bound: the gradient goes to 1 there.
    """
    difference = difference.clamp(max=LARGEST_K3)
    return torch.exp(difference) - difference - 1


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""`algorithm.kl_estimator` -> function of d, elementwise."""
