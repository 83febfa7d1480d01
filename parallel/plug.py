"""Plugs: objects that a user can supply, named in the configuration by a built-in name or as `module:attribute`. The name is checked when
the configuration is read (`Plug.check_name`), the object before anything starts (`Plug.load`). docs/extending.md has recipes. No torch."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class InputError(ValueError):
    """Raised for unusable user input. It becomes a `megatron_rl.errors.UserError` with the same fields."""

    def __init__(self, field: str, value: object, rule: str, fix: str = "") -> None:
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        super().__init__(f"{field} = {value}: {rule}" + (f"; {fix}" if fix else ""))


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
        """Import the object of a name, also from the working directory. Raise InputError if there is none, or if it cannot take `takes`."""
        fix = f"use {self._list_choices()}, which Python can find on PYTHONPATH or in the working directory"
        module, _, attributes = self.builtin.get(name, name).partition(":")
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
        try:
            self.check_name(name)
            loaded = importlib.import_module(module)
            for attribute in attributes.split("."):
                loaded = getattr(loaded, attribute)
        except Exception as error:  # the imported module may raise anything
            raise InputError(self.field, name, f"cannot be imported ({type(error).__name__}: {error})", fix) from None
        if self.takes and name not in self.builtin:
            self.check_call(name, loaded, self.takes)
        return loaded

    def check_call(self, name: str, function: object, takes: tuple[str, ...], what: str = "") -> None:
        """Raise InputError if a function, which is `what` of the object called `name`, does not take these positional arguments."""
        rule = f"{what} must be a plain function of ({', '.join(takes)})".strip()
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InputError(self.field, name, rule, "see docs/extending.md")
        try:
            inspect.signature(function).bind(*takes)
        except TypeError as error:
            raise InputError(self.field, name, f"{rule}: {error}", "see docs/extending.md") from None
        except ValueError:  # some functions written in C have no signature
            return
