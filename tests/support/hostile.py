"""A reward function and environments that misbehave as a text asks; workers load them by name.

This module imports only what they need, because a test counts the imports of a worker.
"""

import os
import re
import signal
import sys
import time

from megatron_rl.types import Reward


def _fail(error):
    raise error


_MISDEEDS = {
    "hang": lambda: time.sleep(1000),
    "hang in C": lambda: pow(3, 10**11),
    "slow": lambda: time.sleep(0.3),
    "raise": lambda: _fail(ValueError("no verdict")),
    "exit": lambda: sys.exit(3),
    "hard exit": lambda: os._exit(7),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": lambda: bytearray(2**36),
    "wrong type": lambda: 1.0,
    "nan": lambda: Reward(float("nan"), True),
    "modules": lambda: Reward(0.0, False, ",".join(sorted(sys.modules))),
    "pid": lambda: Reward(float(os.getpid()), True),
}


def reward(text, problem):
    print("noise on stdout")
    return _MISDEEDS.get(text, lambda: None)() or Reward(float(text == problem.answer), text == problem.answer)


class Environment:
    stop = (">",)

    def __init__(self, problem):
        if problem.answer == "no object":
            raise ValueError("no object")
        self.heard = []

    def step(self, text):
        from megatron_rl.rollout.environments.base import Message  # more than the worker of a reward function may import

        self.heard.append(text)
        if text == "hang":
            time.sleep(1000)
        if text == "hang in C":
            re.match("(a+)+$", "a" * 40 + "b")
        if text == "die":
            os._exit(7)
        if text == "raise":
            raise KeyError("tool")
        if text == "wrong type":
            return "text"
        if text == "no text":
            return Message(None)
        if text == "half a character":
            return Message("\ud800")
        if text == "unpicklable":
            self.heard = (part for part in "ab")
        return None if text == "end" else Message("+".join(map(str, self.heard)))


class Speechless:
    """An environment without `step`."""

    def __init__(self, problem): ...


class Deaf(Speechless):
    def step(self):  # takes no text
        return None


class Unstoppable(Environment):
    stop = ">"  # must be a tuple
