"""The processes below a CPU engine's server do not import torch and SGLang again."""

from __future__ import annotations

import gc
import multiprocessing

from rollout_sglang.hooks.startup import fork_children


def test_children_are_forked_whatever_sglang_asked_for():
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        fork_children(lambda method: multiprocessing.set_start_method(method, force=True), "spawn")
        assert multiprocessing.get_start_method() == "fork" and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        multiprocessing.set_start_method(before, force=True)
