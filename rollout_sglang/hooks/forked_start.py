"""A CPU engine's schedulers and detokenizer, forked from its server instead of started anew."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from typing import Any


def fork_children(original: Callable[..., Any], *args: Any) -> None:
    """Wrap SGLang's `_set_envs_and_config`, which asks for new interpreters, as CUDA needs them: each would import torch and SGLang again,
    6 s of a core. What is imported is no garbage in any of them."""
    original(*args)
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)


def skip_freezing(_: Any) -> None:
    """Replace SGLang's `_freeze_gc_after_server_warmup`: `fork_children` did it, and here the server may not listen yet, which SGLang logs
    with a traceback."""
