"""An environment: dice that the policy may roll three times in one response.

[environment]
name = "examples.plugs.dice:Dice"
"""

from megatron_rl.rollout.environments.base import Message
from megatron_rl.types import Problem


class Dice:
    stop = ("</roll>",)  # ends a turn; the engine's end token always ends one

    def __init__(self, problem: Problem) -> None:  # one object per response
        self.left = 3

    def step(self, text: str) -> Message | None:  # what the policy wrote in this turn
        if not text.endswith("</roll>"):
            return None  # the response is complete
        self.left -= 1
        return Message("4") if self.left >= 0 else Message("no roll is left", error="too many rolls")
