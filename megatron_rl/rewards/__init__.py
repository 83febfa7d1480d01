"""Rewards: functions that judge one completion, the worker processes that run them, and their weighted sum (docs/guides/rewards.md).

This file imports nothing heavy, because every worker imports it. `megatron_rl.rewards.scorer.Scorer` is what the loop uses.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping

from megatron_rl.types import Problem, RewardFunction

FUNCTIONS = {
    "arithmetic": "megatron_rl.rewards.arithmetic:reward",
    "math": "megatron_rl.rewards.math:reward",
    "exact": "megatron_rl.rewards.match:match_answer",
    "format": "megatron_rl.rewards.match:match_format",
}
"""The built-in functions that run in the workers. Any other is named as `module:attribute`."""


def load_function(name: str, settings: Mapping[str, str] | None = None) -> RewardFunction:
    """Import the reward function `name`: a key of FUNCTIONS or `module:attribute`, with `settings` as keyword arguments.

    Load what a built-in function needs, so that no sample's time is spent on it. Raise what the import raises, and TypeError for what
    cannot be called with a text and a problem.
    """
    module_name, _, attribute = FUNCTIONS.get(name, name).partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, attribute)
    if settings:
        function = functools.partial(function, **settings)
    _check_signature(function, name)
    if name in FUNCTIONS:
        getattr(module, "prepare", lambda: None)()
    return function


def _check_signature(function: object, name: str) -> None:
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{name} must be a plain function, not an async one")
    try:
        inspect.signature(function).bind("", Problem("", "", ""))
    except TypeError as error:
        raise TypeError(f"{name} must take (text, problem): {error}") from None
    except ValueError:  # some functions written in C tell no signature
        return
