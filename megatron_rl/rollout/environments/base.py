"""Environments: what a policy interacts with while it answers, such as a tool, a user or a game.

An environment is a class, with one object per completion. After every turn of the policy its `step` receives what the policy wrote, and
returns the next message, or None at the end:

    class Echo:
        stop = ("</say>",)

        def __init__(self, problem: Problem) -> None: ...

        def step(self, text: str) -> Message | None:
            return Message(text.upper()) if text.endswith("</say>") else None

Objects live in worker processes (`megatron_rl.rollout.environment_pool`) and travel between them pickled, so that one that hangs or dies
costs only its own completion. This file imports nothing heavy, because every worker imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron_rl.plugs import ENVIRONMENTS
from megatron_rl.types import Problem
from parallel.plug import InputError


@dataclass(frozen=True)
class Message:
    """The environment's next text, tokenised as it is (a chat template's markers are the environment's to write).

    `error` describes a mistake of the policy, such as a call that cannot be answered: it is counted, and has no other effect.
    """

    text: str
    error: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not isinstance(self.error, str):
            raise TypeError(f"a Message is made of texts, not of {self.text!r} and {self.error!r}")
        self.text.encode()  # half a surrogate pair raises here, not in the tokenizer


class Environment(Protocol):
    """The environment of one completion; picklable."""

    def step(self, text: str) -> Message | None:
        """Return the reply to `text`, one turn without special tokens; None ends the completion. May raise (`reward.on_error`)."""


class EnvironmentClass(Protocol):
    """The class that `environment.name` names. Its optional attribute `stop` is a tuple of texts that end a turn, as the end token does."""

    def __call__(self, problem: Problem) -> Environment: ...


@dataclass(frozen=True)
class Episode(Problem):
    """A problem and the state of its environment."""

    state: bytes = b""
    """The pickled environment; empty before the first turn."""


@dataclass(frozen=True)
class StepResult:
    """The result of one turn: a message; None at the end of the completion; or an error of the environment."""

    message: Message | None = None
    error: str = ""
    state: bytes = b""


def load_environment(name: str) -> EnvironmentClass:
    """Return the class that `environment.name` names. Raise InputError if there is none, or none with a `step` of a text."""
    environment: EnvironmentClass = ENVIRONMENTS.load(name)
    ENVIRONMENTS.check_call(name, getattr(environment, "step", None), ("self", "text"), "its step")
    stop = getattr(environment, "stop", ())
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        raise InputError("environment.name", name, f"its stop ({stop!r}) must be a tuple of texts", 'write e.g. stop = (">>",)')
    return environment
