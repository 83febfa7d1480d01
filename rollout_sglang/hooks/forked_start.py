"""A CPU engine's schedulers and detokenizer, forked from its server instead of started anew."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def fork_children(original: Callable[..., Any], *args: Any) -> None:
    """Wrap SGLang's `_set_envs_and_config`, which asks for new interpreters, as CUDA needs them: each would import torch and SGLang again,
    6 s of a core."""
    original(*args)
    multiprocessing.set_start_method("fork", force=True)
