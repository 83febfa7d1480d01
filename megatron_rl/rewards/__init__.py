"""Rewards: functions that judge one completion, the worker processes that run them, and their weighted sum (docs/guides/rewards.md).

Every worker imports this module, so it imports nothing heavy. The training loop uses `megatron_rl.rewards.scorer.Scorer`.
"""

import functools
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.plugs import REWARDS
from megatron_rl.rewards import foreign
from megatron_rl.types import RewardFunction


def load_function(name: str, settings: Mapping[str, Any] | None = None) -> RewardFunction | foreign.ForeignFunction:
    """Return the reward function `name` with `settings` as keyword arguments: built in, the user's own function of (text, problem), or one
    written for verl, TRL or verifiers (`rewards.foreign`). Raise InputError if it does not exist or takes other arguments. Load the
    libraries of a built-in function in advance, so that this does not count as a completion's time."""
    loaded = replace(REWARDS, takes=()).load(name)
    function = functools.partial(loaded, **settings) if settings and callable(loaded) else loaded
    if name not in REWARDS.builtin:
        if adapted := foreign.adapt(name, function):
            return adapted
        REWARDS.check_call(name, function, REWARDS.takes)
    if name in REWARDS.builtin:
        getattr(importlib.import_module(loaded.__module__), "prepare", lambda: None)()
    return function
