"""Rewards by plain comparison of the answer and of the completion's format."""

import re

from megatron_rl.types import Problem, Reward


def match_answer(text: str, problem: Problem, *, pattern: str = "") -> Reward:
    """Return 1.0 if the answer in `text` equals `problem.answer`, else 0.0. Surrounding white space is ignored. The answer is the whole
    text. With `pattern`, it is the last match, or the first group of that match if there is one."""
    answer = text
    if pattern:
        matches = list(re.finditer(pattern, text, re.DOTALL))
        if not matches:
            return Reward(0.0, False)
        answer = matches[-1][1 if matches[-1].re.groups else 0] or ""
    correct = answer.strip() == problem.answer.strip()
    return Reward(float(correct), correct)


def match_format(text: str, problem: Problem, *, pattern: str) -> Reward:
    """Return 1.0 if `pattern` matches all of `text`, ignoring surrounding white space, else 0.0."""
    matches = re.fullmatch(pattern, text.strip(), re.DOTALL) is not None
    return Reward(float(matches), matches)
