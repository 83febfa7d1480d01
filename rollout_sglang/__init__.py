"""All code that depends on SGLang: engine processes, their client, the code inside them, and the hooks on SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from megatron_rl.rollout.engine import Engine


def launch(config: Config, model_path: Path, log_dir: Path, number: int = 0, *, empty: bool = False) -> Engine:
    """See `megatron_rl.rollout.engine.EngineLauncher`: the entry point `sglang` of the group `megatron_rl.rollout`.

    Import late, because SGLang imports this package at start-up, before its stub modules are in place.
    """
    from rollout_sglang.engine import SGLangEngine
    from rollout_sglang.launch_args import EngineLaunchSpec

    return SGLangEngine(EngineLaunchSpec(config, model_path, log_dir, number, empty))
