"""Soft overlong penalty (DAPO, arXiv 2503.14476, eq. 13), which grows linearly over the last part of the length budget.

L = longest response, C = share * L:   0 for |y| <= L - C,   (L - C - |y|) / C * penalty beyond,   -penalty at |y| = L
"""


def compute_overlong_penalty(length: int, longest: int, share: float, penalty: float) -> float:
    """Return the term added to the reward of a response of `length` tokens, between -penalty and 0."""
    buffer = share * longest
    if not buffer:
        return 0.0
    return -penalty * min(max(length - (longest - buffer), 0.0) / buffer, 1.0)
