"""Everything that knows SGLang: engines as processes, their client, what runs inside them, and the plug-ins that make them obey."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from megatron_rl.rollout.engine import Engine


def launch(config: Config, model_path: Path, log_dir: Path, number: int = 0) -> Engine:
    """Entry point `sglang` of the group `megatron_rl.rollout`; see `rollout_sglang.engine.start_engine`.

    Imported late, because SGLang imports this package at start-up, before its stand-ins are in place.
    """
    from rollout_sglang.engine import start_engine

    return start_engine(config, model_path, log_dir, number)
