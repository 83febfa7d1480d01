"""A reward function: the answer must occur somewhere in the completion.

[reward]
function = "examples.plugs.contains_answer:reward"
"""

from megatron_rl.types import Problem, Reward


def reward(text: str, problem: Problem) -> Reward:
    right = problem.answer in text
    return Reward(value=1.0 if right else -0.1, correct=right)
