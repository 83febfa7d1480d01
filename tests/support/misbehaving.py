"""One plug of each kind that misbehaves as asked: through its settings, its input, or the variable MISDEED, which child processes inherit.

The module imports only what workers may import; whatever needs torch imports it inside.
"""

import os
import signal
import sys
import time

from megatron_rl.types import Problem, Reward

VARIABLE = "MISDEED"


class OddError(BaseException):
    """Not an Exception, as some libraries raise."""


class UnprintableError(Exception):
    def __str__(self):
        raise SystemExit(0)


def _raise(error):
    raise error


def _fork():
    if os.fork() == 0:
        return  # the child leaves the call, too


MISDEEDS = {
    "raises": lambda: _raise(ValueError("two\nlines")),
    "raises what cannot be printed": lambda: _raise(UnprintableError()),
    "raises no Exception": lambda: _raise(OddError("odd")),
    "stops iteration": lambda: _raise(StopIteration()),
    "interrupts": lambda: _raise(KeyboardInterrupt()),
    "calls sys.exit": lambda: sys.exit(0),
    "calls os._exit": lambda: os._exit(0),
    "hangs": lambda: time.sleep(1000),
    "forks": _fork,
    "prints 100 MB": lambda: [print("x" * 9999) for _ in range(10_000)],
    "kills itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
"""What any code may do. After forking and printing, a call goes on as if nothing had happened."""


def do(misdeed=None):
    """Misbehave as asked, or as MISDEED says. Return what was asked."""
    asked = os.environ.get(VARIABLE, "") if misdeed is None else misdeed
    MISDEEDS.get(asked, lambda: None)()
    return asked


_calls = []


def loss(logprobs, batch, config, *, misdeed="", after=0):
    """PPO's gradient without a clip. `after`: number of calls before the misdeed; the trial before a run has 2."""
    import torch

    _calls.append(misdeed)
    misdeed = misdeed if len(_calls) > after else ""
    do(misdeed)
    losses, clipped = -logprobs * batch.advantages, torch.zeros_like(batch.mask, dtype=torch.bool)
    if misdeed == "mutates":
        batch.loss_weights.zero_()
    elif misdeed == "exits in the backward pass":
        losses.register_hook(lambda gradient: sys.exit(0))
    returned = {
        "nan": (losses * torch.nan, clipped),
        "wrong length": (losses[:, 1:], clipped[:, 1:]),
        "wrong type": 0.5,
        "no gradient": (losses.detach(), clipped),
        "one value": (losses,),
        "numbers": (losses.tolist(), clipped),
    }
    return returned.get(misdeed, (losses, clipped))


def advantage(rewards, counted):
    misdeed = do()
    result = (rewards - rewards.mean()) * counted
    if misdeed == "mutates":
        rewards.zero_()
        counted.fill_(False)
    returned = {
        "nan": result / 0,
        "wrong length": result[:, 1:],
        "wrong type": result.tolist(),
        "nothing": None,
        "bools": counted,
    }
    return returned.get(misdeed, result)


def rows(misdeed=None, later=None, names=()):
    misdeed = do(misdeed)
    if misdeed == "mutates":
        names += ["b"]
    if misdeed == "wrong type":
        return 5
    return _yield_rows(misdeed, later)


def _yield_rows(misdeed, later):
    row = {"question": "", "answer": ""}
    for number in range(4):
        if number == 2:
            do(later or "")
        row["question"], row["answer"] = f"{number}+1?", f"#### {number + 1}"
        yield {"nan": {**row, "answer": float("nan")}, "no row": [row], "bytes": b"row"}.get(misdeed, row)


class Generator:
    """A data source that misbehaves from position `start` on."""

    def __init__(self, seed, start=0):
        self.start, self.fingerprint = start, (start,)

    def train_problem(self, position, accept):
        misdeed = do() if position >= self.start else ""
        problem = Problem(f"{position}", f"{position}?", str(position))
        returned = {
            "nan": Problem("p", "?", float("nan")),
            "wrong type": "problem",
            "nothing": None,
            "history of numbers": Problem("p", "?", "1", history=(1,)),
            "columns with an object": Problem("p", "?", "1", columns={"a": object()}),
            "half a character": Problem("p", "\ud800", "1"),
        }
        return returned.get(misdeed, problem)

    def held_out(self, count):
        return [Problem(f"held {number}", f"{number} held?", "1") for number in range(count)]


def read_row(row):
    from megatron_rl.data.formats import ProblemRow

    misdeed = do()
    if misdeed == "mutates":
        row["question"] = row["answer"] = "1"
    result = ProblemRow(row["question"], row["answer"].removeprefix("#### "))
    returned = {
        "nan": ProblemRow("?", "1", pass_rate=float("nan")),
        "wrong length": ProblemRow("?", "1", history=({},)),
        "wrong type": 5,
        "nothing": None,
        "a level of text": ProblemRow("?", "1", level="high"),
        "half a character": ProblemRow("\ud800", "1"),
    }
    return returned.get(misdeed, result)


class Tracker:
    def __init__(self, folder, config, resume_step):
        if os.environ.get(VARIABLE, "").startswith("start "):
            do(os.environ[VARIABLE].removeprefix("start "))
        if os.environ.get(VARIABLE) == "mutates":
            config.clear()

    def log(self, row, step):
        if do() == "mutates":
            row.clear()

    def finish(self, status):
        do()


def reward(text, problem):
    do(text)
    if text == "mutates":
        problem.columns["gold"] = problem.__dict__["answer"] = "other"
    verdicts = {"nan": float("nan"), "wrong length": [1.0, 0.0], "wrong type": "right"}
    return verdicts.get(text, Reward(1.0, text == problem.answer))


class Environment:
    stop = (">",)

    def __init__(self, problem):
        self.problem = problem

    def step(self, text, stop):
        from megatron_rl.rollout.environments.base import Message

        do(text)
        if text == "mutates":
            self.problem.__dict__["answer"] = "other"
        return {"nan": float("nan"), "wrong length": (Message("a"), Message("b")), "wrong type": "text"}.get(text, Message(text))


def agent(problem):
    from support.agent_programs import post

    post([{"role": "user", "content": "a"}], max_tokens=4)
    do(problem.prompt)
    if problem.prompt == "mutates":
        problem.__dict__["answer"] = "other"
    return {"nan": float("nan"), "wrong length": [1.0, 0.0], "wrong type": "right"}.get(problem.prompt, 0.5)
