"""Rewards: functions that judge one completion, the worker processes that run them, and their weighted sum (docs/guides/rewards.md).

Every worker imports this module, so it imports nothing heavy. The training loop uses `megatron_rl.rewards.scorer.Scorer`.
"""

import functools
import importlib
from collections.abc import Mapping

from megatron_rl.plugs import REWARDS
from megatron_rl.types import RewardFunction


def load_function(name: str, settings: Mapping[str, str] | None = None) -> RewardFunction:
    """Return the reward function `name` with `settings` as keyword arguments. Raise InputError if it does not exist. Load the libraries
    of a built-in function in advance, so that this does not count as a completion's time."""
    function = REWARDS.load(name)
    if name in REWARDS.builtin:
        getattr(importlib.import_module(function.__module__), "prepare", lambda: None)()
    return functools.partial(function, **settings) if settings else function
