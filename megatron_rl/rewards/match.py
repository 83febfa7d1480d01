"""Rewards by plain comparison: the answer word for word, and the form of the completion."""

from __future__ import annotations

import re

from megatron_rl.types import Problem, Reward


def match_answer(text: str, problem: Problem, *, pattern: str = "") -> Reward:
    """Return 1.0 when the answer in `text` equals `problem.answer`, white space at the ends aside, else 0.0.

    The answer is the whole text, or with `pattern` its last match: the first group where there is one. Without a match: 0.0.
    """
    answer = text
    if pattern:
        matches = list(re.finditer(pattern, text, re.DOTALL))
        if not matches:
            return Reward(0.0, False)
        answer = matches[-1][1 if matches[-1].re.groups else 0] or ""
    correct = answer.strip() == problem.answer.strip()
    return Reward(float(correct), correct)


def match_format(text: str, problem: Problem, *, pattern: str) -> Reward:
    """Return 1.0 when `pattern` matches all of `text`, white space at the ends aside, else 0.0."""
    matches = re.fullmatch(pattern, text.strip(), re.DOTALL) is not None
    return Reward(float(matches), matches)
