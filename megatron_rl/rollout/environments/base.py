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

import importlib
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.errors import UserError
from megatron_rl.types import Problem

ENVIRONMENTS = {"calculator": "megatron_rl.rollout.environments.calculator:Calculator"}
"""Values of `environment.name` besides `module:attribute`, and where each is defined."""


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
    """The class that `environment.name` names. Its optional attribute `stop` lists strings that end a turn, as the end token does."""

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
    """Return the class that `environment.name` names. Raise UserError if there is none."""
    module, colon, attribute = ENVIRONMENTS.get(name, name).partition(":")
    fix = f"use one of {', '.join(ENVIRONMENTS)}, or module:attribute of a class that Python finds (PYTHONPATH)"
    if not colon:
        raise UserError("environment.name", name, "is not known", fix)
    try:
        environment = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module raises on import
        raise UserError("environment.name", name, f"cannot be imported ({type(error).__name__}: {error})", fix) from None
    if not callable(getattr(environment, "step", None)):
        raise UserError("environment.name", name, "has no method step(text)", "see docs/guides/environments.md")
    stop_strings(name, environment)
    return environment


def stop_strings(name: str, environment: EnvironmentClass) -> tuple[str, ...]:
    """Return the strings at which the engine ends a turn. Raise UserError if `stop` is anything else."""
    stop = getattr(environment, "stop", ())
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        raise UserError("environment.name", name, f"its stop ({stop!r}) must be a tuple of texts", 'write e.g. stop = (">>",)')
    return stop
