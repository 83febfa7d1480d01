"""The command `train`: the preflight, then a session."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.preflight import check_run
from megatron_rl.training.resume import find_run_to_resume


def run_training(config: Config) -> Path:
    """Train as configured and return the run's folder. Under torchrun every rank calls it.

    Raises UserError before anything heavy starts, RunError when the run breaks; a broken run keeps its log and a last checkpoint.
    """
    layout = check_run(config)
    resumed = find_run_to_resume(config)
    from megatron_rl.training.session import run_session

    return run_session(config, layout, resumed)
