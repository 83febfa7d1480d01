"""Rewards: functions that judge one completion, the worker processes that run them, and their weighted sum (docs/guides/rewards.md).

This file imports nothing heavy, because every worker imports it. `megatron_rl.rewards.scorer.Scorer` is what the loop uses.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping

from megatron_rl.plugs import REWARDS
from megatron_rl.types import RewardFunction


def load_function(name: str, settings: Mapping[str, str] | None = None) -> RewardFunction:
    """Return the reward function `name`, with `settings` as keyword arguments. Raise InputError where there is none.

    Load what a built-in function needs, so that no sample's time is spent on it.
    """
    function = REWARDS.load(name)
    if name in REWARDS.builtin:
        getattr(importlib.import_module(function.__module__), "prepare", lambda: None)()
    return functools.partial(function, **settings) if settings else function
