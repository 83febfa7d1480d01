"""An environment: dice that the policy may roll three times in one answer.

[environment]
name = "examples.plugs.dice:Dice"
"""

from megatron_rl.rollout.environments.base import Message
from megatron_rl.types import Problem


class Dice:
    stop = ("</roll>",)  # the engine ends a turn here; its end token always ends one

    def __init__(self, problem: Problem) -> None:  # one object per answer
        self.left = 3

    def step(self, text: str) -> Message | None:  # what the policy wrote in this turn
        if not text.endswith("</roll>"):
            return None  # the answer is complete
        self.left -= 1
        return Message("4") if self.left >= 0 else Message("no roll is left", error="too many rolls")
