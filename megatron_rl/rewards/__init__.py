"""Rewards: functions that judge one completion, and the pool of worker processes that runs them.

This file imports nothing heavy, because every worker imports it. The pool is `megatron_rl.rewards.pool.RewardPool`.
"""

from __future__ import annotations

import importlib

from megatron_rl.types import RewardFunction

FUNCTIONS = {"arithmetic": "megatron_rl.rewards.arithmetic:reward", "math": "megatron_rl.rewards.math:reward"}
"""What `reward.function` may name, and where it lives. Any other function is named as `module:attribute`."""


def load_function(name: str) -> RewardFunction:
    """Import the reward function `name`: a key of FUNCTIONS or `module:attribute`. Raises what the import raises."""
    module, _, attribute = FUNCTIONS.get(name, name).partition(":")
    function: RewardFunction = getattr(importlib.import_module(module), attribute)
    return function
