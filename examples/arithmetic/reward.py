"""A reward function: the completion must end with `#` and the right integer.

[reward]
function = "examples.arithmetic.reward:reward"
"""

import re

from megatron_rl.types import Problem, Reward

_INTEGER = re.compile(r"-?[0-9]{1,18}")


def reward(text: str, problem: Problem) -> Reward:
    """Return 1.0 for a correct answer, else 0.0. Example: `57+8=65,65-3=62#62` for the answer 62."""
    _, marker, last = text.rpartition("#")
    answer = str(int(last)) if marker and _INTEGER.fullmatch(last) else ""
    correct = answer == str(int(problem.answer))
    return Reward(float(correct), correct, answer=answer)
