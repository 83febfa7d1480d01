"""Soft overlong penalty (DAPO, arXiv 2503.14476, eq. 13), which grows linearly over the last part of the length budget.

L = longest response, C = share * L:   0 for |y| <= L - C,   (L - C - |y|) / C * penalty beyond,   -penalty at |y| = L

In a group with equal rewards r, the penalties p alone determine the advantages: A_i = p_i - mean(p). Otherwise, they are added to r.
"""

from collections.abc import Sequence
from statistics import fmean

from megatron_rl.types import Completion, are_equal


def compute_overlong_penalty(length: int, longest: int, share: float, penalty: float) -> float:
    """Return the term added to the reward of a response of `length` tokens, between -penalty and 0."""
    buffer = share * longest
    if not buffer:
        return 0.0
    return -penalty * min(max(length - (longest - buffer), 0.0) / buffer, 1.0)


def center_lone_penalties(advantages_B: Sequence[float], completions_B: Sequence[Completion], group_size: int) -> list[float]:
    """Return the advantages, with p_i - mean(p) in each group whose length penalties p differ although all rewards are equal. A division by
    the standard deviation of the group would make any such penalty as large as the difference between right and wrong."""
    advantages_B = list(advantages_B)
    for start in range(0, len(advantages_B), group_size):
        counted = [number for number in range(start, start + group_size) if not completions_B[number].reward.excluded]
        penalties = {number: completions_B[number].length_penalty for number in counted}
        rewards = [completions_B[number].reward for number in counted]
        parts = {label for reward in rewards for label in reward.parts}
        constant = all(are_equal(reward.parts.get(label, 0.0) for reward in rewards) for label in parts)
        if len({*penalties.values()}) > 1 and constant and are_equal(reward.value for reward in rewards):
            mean = fmean(penalties.values())
            for number, penalty in penalties.items():
                advantages_B[number] = penalty - mean
    return advantages_B
