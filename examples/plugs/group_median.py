"""An advantage: r_i - median(r) of the group, which one outlier among the rewards does not move.

[algorithm]
advantage = "examples.plugs.group_median:group_median"
"""

from __future__ import annotations

import torch


def group_median(rewards: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return float64 [groups, members] of rewards float64 and of bool [groups, members], False for a member that is left out."""
    median = rewards.masked_fill(~counted, torch.nan).nanquantile(0.5, dim=1, keepdim=True)
    return (rewards - median).masked_fill(~counted, 0.0)
