"""Environments: what a policy talks to while it answers, such as a tool, a user or a game.

An environment is a class. One object is made of it for each answer; after every turn of the policy its `step` is given what the policy
wrote, and returns what comes next, or None at the end:

    class Echo:
        stop = ("</say>",)

        def __init__(self, problem: Problem) -> None: ...

        def step(self, text: str) -> Message | None:
            return Message(text.upper()) if text.endswith("</say>") else None

Objects live in worker processes (`megatron_rl.rollout.generation`) and travel between them pickled, so that one which hangs or dies costs
its own
answer only. This file imports nothing heavy, because every worker imports it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.errors import UserError
from megatron_rl.types import Problem

ENVIRONMENTS = {"calculator": "megatron_rl.rollout.environments.calculator:Calculator"}
"""What `environment.name` may name besides `module:attribute`, and where it lives."""


@dataclass(frozen=True)
class Message:
    """What the environment says next, tokenised as it stands (a chat template's marks are the environment's to write).

    `error` tells what it could not do of what the policy asked for: a mistake of the policy, which is counted and costs nothing else.
    """

    text: str
    error: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not isinstance(self.error, str):
            raise TypeError(f"a Message is made of texts, not of {self.text!r} and {self.error!r}")
        self.text.encode()  # half a surrogate pair raises here, not in the tokenizer


class Environment(Protocol):
    """The other side of one answer; picklable."""

    def step(self, text: str) -> Message | None:
        """The answer to one turn of the policy, `text` without special tokens; None ends the answer. May raise (`reward.on_error`)."""


class EnvironmentClass(Protocol):
    """What `environment.name` names. It may have an attribute `stop`: strings at which the engine ends a turn, as the end token does."""

    def __call__(self, problem: Problem) -> Environment: ...


@dataclass(frozen=True)
class Episode(Problem):
    """A problem and its environment so far."""

    state: bytes = b""
    """The pickled environment; empty before the first turn."""


@dataclass(frozen=True)
class StepResult:
    """What comes of one turn: a message; none, at the end of the answer; or an error of the environment."""

    message: Message | None = None
    error: str = ""
    state: bytes = b""


def load_environment(name: str) -> EnvironmentClass:
    """The class that `environment.name` names. Raises UserError where there is none."""
    module, colon, attribute = ENVIRONMENTS.get(name, name).partition(":")
    fix = f"use one of {', '.join(ENVIRONMENTS)}, or module:attribute of a class that Python finds (PYTHONPATH)"
    if not colon:
        raise UserError("environment.name", name, "is not known", fix)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module raises on import
        raise UserError("environment.name", name, f"cannot be imported ({type(error).__name__}: {error})", fix) from None
    if not callable(getattr(found, "step", None)):
        raise UserError("environment.name", name, "has no method step(text)", "see docs/guides/environments.md")
    stop_strings(name, found)
    return found


def stop_strings(name: str, environment: EnvironmentClass) -> tuple[str, ...]:
    """Strings at which the engine ends a turn. Raises UserError where `stop` is anything else."""
    stop = getattr(environment, "stop", ())
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        raise UserError("environment.name", name, f"its stop ({stop!r}) must be a tuple of texts", 'write e.g. stop = (">>",)')
    return stop
