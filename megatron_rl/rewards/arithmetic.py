"""The reward of the generated task: the integer after the last `#` must be the answer, and nothing may follow it."""

from __future__ import annotations

import re

from megatron_rl.types import Problem, Reward

_INTEGER = re.compile(r"-?[0-9]{1,18}")


def reward(text: str, problem: Problem) -> Reward:
    """Return 1.0 for an exactly right answer, else 0.0. Example: `57+8=65,65-3=62#62` for the answer 62."""
    answer = final_answer(text)
    correct = answer is not None and int(answer) == int(problem.answer)
    return Reward(float(correct), correct)


def final_answer(text: str) -> str | None:
    """Return the integer after the last `#` in canonical spelling; None where anything else follows it, or there is no `#`."""
    _, marker, answer = text.rpartition("#")
    return str(int(answer)) if marker and _INTEGER.fullmatch(answer) else None
