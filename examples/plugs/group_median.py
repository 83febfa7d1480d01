"""An advantage: r_i - median(r) of the group. A single outlier does not shift the median.

[algorithm]
advantage = "examples.plugs.group_median:group_median"
"""

import torch


def group_median(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return advantages from float64 rewards, both of shape [groups, members]. `counted` is False for excluded members."""
    median = rewards.masked_fill(~counted, torch.nan).nanquantile(0.5, dim=1, keepdim=True)
    return (rewards - median).masked_fill(~counted, 0.0)
