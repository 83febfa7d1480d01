"""The section `[log]`: where a run writes. Imports without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from megatron_rl.config.base import ConfigSection
from megatron_rl.plugs import TRACKERS


class LogConfig(ConfigSection):
    """Where a run writes."""

    dir: Path = Path("runs/default")
    """Parent folder; every run makes a folder of its own in it."""
    trackers: tuple[Annotated[str, AfterValidator(TRACKERS.check_name)], ...] = ("tensorboard",)
    """What gets the rows of metrics.jsonl as well: `tensorboard`, `wandb`, `mlflow`, or your own as module:attribute."""
    samples: int = Field(8, ge=0)
    """Completions kept per step for the report."""
    attribute_every: int = Field(0, ge=0)
    """RL steps between attributions of the mismatch to its causes, at three forward passes each (docs/reference/precision.md); 0: never."""
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps of which a Chrome trace and a table of operators are written into RUN_DIR/profile (docs/guides/observing.md)."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks that are profiled in these steps."""
    stuck_after: float = Field(1800.0, ge=0)
    """Seconds without any rank entering another phase after which a run says where each rank stands and ends; 0: never
    (docs/guides/slurm.md)."""
