"""Plugs: objects that a user can supply, named in the configuration by a built-in name or as `module:attribute`. The name is checked when
the configuration is read (`Plug.check_name`), the object before anything starts (`Plug.load`). docs/extending.md has recipes. No torch."""

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class InputError(ValueError):
    """Raised for unusable user input. It becomes a `megatron_rl.errors.UserError` with the same fields."""

    def __init__(self, field: str, value: object, rule: str, fix: str = "") -> None:
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        super().__init__(f"{field} = {value}: {rule}" + (f"; {fix}" if fix else ""))


class SignalExit(SystemExit):
    """Raised by the project's own signal handlers. Code that calls sys.exit raises no SignalExit."""


class PlugError(RuntimeError):
    """Raised if an object of the user's own fails while it is called. The message names the configuration field and the object."""

    def __init__(self, field: str, name: str, reason: str) -> None:
        self.field, self.name, self.reason = field, name, reason
        super().__init__(f"{field} = {name!r}: {reason}")


_loaded: dict[str, tuple[str, str]] = {}
"""Field and name of each object of the user's own that this process has loaded, by the file of its module."""


@dataclass(frozen=True)
class Plug:
    """One kind of plug."""

    field: str  # name of the configuration field
    builtin: Mapping[str, str]  # maps built-in names to their `module:attribute`
    takes: tuple[str, ...] = ()
    """Positional arguments of a call, or empty if the caller checks the object further. Built-in objects are not checked."""

    def _list_choices(self, *more: str) -> str:
        return f"one of {', '.join([*self.builtin, *more])}, or " * bool(self.builtin) + "your own as module:attribute"

    def is_own(self, name: str) -> bool:
        """Return whether a name is not built in and has the form `module:attribute`."""
        return name not in self.builtin and _OWN.fullmatch(name) is not None

    def check_name(self, name: str, *more: str) -> str:
        """Return the name. Raise ValueError if it is neither built in nor of the form `module:attribute`. `more`: other allowed names."""
        if name not in self.builtin and not self.is_own(name):
            raise ValueError(f"must be {self._list_choices(*more)}")
        return name

    def load(self, name: str) -> Any:
        """Import the object of a name, also from the working directory. Raise InputError if there is none, if it cannot take `takes`, or
        if its module raises an error or calls sys.exit."""
        fix = f"use {self._list_choices()}, which Python can find on PYTHONPATH or in the working directory"
        module, _, attributes = self.builtin.get(name, name).partition(":")
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
        try:
            self.check_name(name)
            loaded = importlib.import_module(module)
            for attribute in attributes.split("."):
                loaded = getattr(loaded, attribute)
        except SignalExit:
            raise
        except (Exception, SystemExit) as error:  # the imported module may raise anything
            raise InputError(self.field, name, f"cannot be imported ({describe_error(error)})", fix) from None
        if name not in self.builtin:
            if file := getattr(sys.modules.get(module), "__file__", None):
                _loaded[file] = self.field, name
            if self.takes:
                self.check_call(name, loaded, self.takes)
        return loaded

    @contextmanager
    def call(self, name: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Context manager for calls of the object of a name during a run. If it is the user's own, raise PlugError for its errors, for
        sys.exit, and for an exception of the block, such as that of a check of what it returned. Exceptions of the types `passing` pass."""
        if name in self.builtin:
            yield
            return
        known: tuple[type[BaseException], ...] = (PlugError, SignalExit, *passing)
        try:
            yield
        except known:
            raise
        except (Exception, SystemExit) as error:  # the object may raise anything
            raise PlugError(self.field, name, f"fails ({describe_error(error)}{_locate(error)})") from None

    def check_call(self, name: str, function: object, takes: tuple[str, ...], what: str = "") -> None:
        """Raise InputError if a function, which is `what` of the object called `name`, does not take these positional arguments."""
        rule = f"{what} must be a plain function of ({', '.join(takes)})".strip()
        if not callable(function) or inspect.iscoroutinefunction(function):
            found = "one with async def" if callable(function) else type(function).__name__
            raise InputError(self.field, name, f"{rule}, not {found}", "see docs/extending.md")
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions written in C have no signature
            return
        except Exception as error:
            raise InputError(self.field, name, f"has no readable signature ({describe_error(error)})", "see docs/extending.md") from None
        try:
            signature.bind(*takes)
        except TypeError as error:
            raise InputError(self.field, name, f"{rule}: {error}", "see docs/extending.md") from None


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message in one short line, also of one whose message cannot be written."""
    try:
        text = " ".join(str(error).split())[:500].encode(errors="replace").decode()
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    except (Exception, SystemExit):
        return f"{type(error).__name__}: its message cannot be written"


def find_plug_error(error: BaseException) -> PlugError | None:
    """Return the error of the object of the user's own from whose code an exception was raised, or None for other exceptions. Such code
    also runs outside of calls, for example in a backward pass."""
    if isinstance(error, PlugError):
        return error
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in _loaded:
            return PlugError(*_loaded[frame.filename], f"fails ({describe_error(error)}{_locate(error)})")
    return None


def _locate(error: BaseException) -> str:
    """Return the place in a file of the user's own at which an exception, or the one that it replaced, was raised; or ""."""
    frames = [*traceback.extract_tb((error.__context__ or error).__traceback__), *traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.filename in _loaded]
    return f", {os.path.basename(own[-1].filename)} line {own[-1].lineno}" if own else ""
