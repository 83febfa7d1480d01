"""A reward function: the answer must occur somewhere in the completion.

[[reward.functions]]
name = "examples.plugs.contains_answer:reward"
settings = {wrong = -0.2}
"""

from megatron_rl.types import Problem, Reward


def reward(text: str, problem: Problem, wrong: float = -0.1) -> Reward:
    right = problem.answer in text
    return Reward(value=1.0 if right else wrong, correct=right)
