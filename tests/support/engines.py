"""Engines without a trainer: their configuration, and engines that cannot start. Nothing of Megatron."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import RunError
from rollout_sglang import engine, launch_args

_SMALL = {"max_running_requests": 16, "max_total_tokens": 4096, "request_timeout": 60.0}


def engine_config(checkpoint: Path, precision: dict[str, Any], start_timeout: float = 240.0) -> Config:
    rollout = {**_SMALL, "start_timeout": start_timeout}
    return Config.model_validate({"model": {"path": checkpoint}, "precision": precision, "rollout": rollout})


def launch_only(checkpoint: Path, folder: Path, fault: dict[str, Any]) -> tuple[str, str, float]:
    """Starts an engine that cannot start: (the error's line, its log tail, seconds it took).

    `fault`: `start_timeout` in seconds, a `port` to insist on, or a server `argument`.
    """
    config = engine_config(checkpoint, {"mode": "fp8_unified", "high": "fp32"}, fault.get("start_timeout", 240.0))
    if "port" in fault:
        launch_args._free_port = lambda slot: fault["port"]
    if "argument" in fault:
        arguments = launch_args._server_arguments
        launch_args._server_arguments = lambda *given: [*arguments(*given), fault["argument"]]
    began = time.perf_counter()
    try:
        engine.start_engine_and_wait(config, checkpoint, folder).stop()
    except RunError as error:
        return str(error), error.log_tail, time.perf_counter() - began
    raise AssertionError("the engine started")
