"""Environments that the policy interacts with while it responds, such as tools, users or games.

An environment is a class with one object per completion. After every turn of the policy, its `step` receives the policy's text and returns
the next message, or None to end the completion:

    class Echo:
        stop = ("</say>",)

        def __init__(self, problem: Episode) -> None: ...

        def step(self, text: str, stop: str) -> Message | None:
            return Message(text.upper()) if stop == "</say>" else None

Objects live in worker processes (`megatron_rl.rollout.environments.pool`) and travel between them pickled, so an environment that hangs or
dies affects only its own completion. Every worker imports this module, so it imports nothing heavy.
"""

import inspect
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.plugs import ENVIRONMENTS
from megatron_rl.types import Episode
from parallel.plug import InputError


@dataclass(frozen=True)
class Message:
    """The environment's next text, tokenized as is, or with `role` ("user" or "tool") as the chat template writes a message. Text that
    looks like a control token is treated as `data.special_text` says. `error` describes a mistake of the policy, such as an invalid
    call. It is counted and has no other effect."""

    text: str
    error: str = ""
    role: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not isinstance(self.error, str):
            raise TypeError(f"text and error of a Message must be strings, not {self.text!r} and {self.error!r}")
        if self.role not in ("", "user", "tool"):
            raise TypeError(f'role of a Message must be "user" or "tool", not {self.role!r}')
        self.text.encode()  # raises here for a lone surrogate, not in the tokenizer


class Environment(Protocol):
    """The environment of one completion. Must be picklable."""

    def step(self, text: str, stop: str) -> Message | None:
        """Return the reply to one turn, or None to end the completion. May raise (`reward.on_error`).

        `text` is without special tokens, and ends with the stop text if one ended the turn. `stop`: that stop text, or "" if the end token
        ended the turn. The argument may be left out of the definition.
        """


class EnvironmentClass(Protocol):
    """The class named by `environment.name`. Its optional attribute `stop` is a tuple of texts that end a turn, like the end token."""

    def __call__(self, problem: Episode) -> Environment: ...


@dataclass(frozen=True)
class StepResult:
    """Result of one turn: a message, None at the end of the completion, or an error of the environment."""

    message: Message | None = None
    error: str = ""
    state: bytes = b""


def takes_stop(environment: EnvironmentClass) -> bool:
    """Return whether the environment's `step` takes the stop text."""
    return "stop" in inspect.signature(environment.step).parameters  # type: ignore[attr-defined]


def load_environment(name: str) -> EnvironmentClass:
    """Return the class named by `environment.name`. Raise InputError if it does not exist or has no valid `step`."""
    environment: EnvironmentClass = ENVIRONMENTS.load(name)
    takes = ("self", "text", "stop") if hasattr(environment, "step") and takes_stop(environment) else ("self", "text")
    ENVIRONMENTS.check_call(name, getattr(environment, "step", None), takes, "its step")
    stop = getattr(environment, "stop", ())
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        raise InputError("environment.name", name, f"its stop ({stop!r}) must be a tuple of texts", 'write e.g. stop = (">>",)')
    return environment
