"""Environments that the policy interacts with while it responds, such as tools, users or games.

An environment is a class with one object per completion. After every turn of the policy, its `step` receives the policy's text and returns
the next message, or None to end the completion:

    class Echo:
        stop = ("</say>",)

        def __init__(self, problem: Problem) -> None: ...

        def step(self, text: str) -> Message | None:
            return Message(text.upper()) if text.endswith("</say>") else None

Objects live in worker processes (`megatron_rl.rollout.environments.pool`) and travel between them pickled, so an environment that hangs or
dies affects only its own completion. Every worker imports this module, so it imports nothing heavy.
"""

from dataclasses import dataclass
from typing import Protocol

from megatron_rl.plugs import ENVIRONMENTS
from megatron_rl.types import Problem
from parallel.plug import InputError


@dataclass(frozen=True)
class Message:
    """The environment's next text, tokenized as is; it must contain the markers of a chat template itself. `error` describes a mistake of
    the policy, such as an invalid call. It is counted and has no other effect."""

    text: str
    error: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not isinstance(self.error, str):
            raise TypeError(f"text and error of a Message must be strings, not {self.text!r} and {self.error!r}")
        self.text.encode()  # raises here for a lone surrogate, not in the tokenizer


class Environment(Protocol):
    """The environment of one completion. Must be picklable."""

    def step(self, text: str) -> Message | None:
        """Return the reply to `text`, one turn without special tokens, or None to end the completion. May raise (`reward.on_error`)."""


class EnvironmentClass(Protocol):
    """The class named by `environment.name`. Its optional attribute `stop` is a tuple of texts that end a turn, like the end token."""

    def __call__(self, problem: Problem) -> Environment: ...


@dataclass(frozen=True)
class Episode(Problem):
    """A problem and the state of its environment."""

    state: bytes = b""  # the pickled environment; empty before the first turn


@dataclass(frozen=True)
class StepResult:
    """Result of one turn: a message, None at the end of the completion, or an error of the environment."""

    message: Message | None = None
    error: str = ""
    state: bytes = b""


def load_environment(name: str) -> EnvironmentClass:
    """Return the class named by `environment.name`. Raise InputError if it does not exist or has no valid `step`."""
    environment: EnvironmentClass = ENVIRONMENTS.load(name)
    ENVIRONMENTS.check_call(name, getattr(environment, "step", None), ("self", "text"), "its step")
    stop = getattr(environment, "stop", ())
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        raise InputError("environment.name", name, f"its stop ({stop!r}) must be a tuple of texts", 'write e.g. stop = (">>",)')
    return environment
