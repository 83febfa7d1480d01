"""The `[log]` section. See docs/guides/observing.md."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from megatron_rl.config.base import MAX_COUNT, MAX_RANKS, MAX_SECONDS, MAX_STEPS, ConfigSection
from megatron_rl.config.change import NO_RESULT
from megatron_rl.plugs import TRACKERS


class LogConfig(ConfigSection):
    """What a run records and where."""

    on_resume = NO_RESULT

    dir: Path = Path("runs/default")
    """Parent folder of run folders. Each run creates its own folder in it."""
    trackers: tuple[Annotated[str, AfterValidator(TRACKERS.check_name)], ...] = ("tensorboard",)
    """Trackers that also receive the rows of metrics.jsonl: `tensorboard`, `wandb`, `mlflow`, or your own as `module:attribute`."""
    samples: int = Field(8, ge=0, le=MAX_COUNT)
    """Number of completions per step to keep for the report."""
    attribute_every: int = Field(0, ge=0, le=MAX_STEPS)
    """RL steps between attributions of the trainer-engine mismatch to its causes. Each costs three forward passes. 0 disables them.
    See docs/reference/precision.md."""
    profile_steps: tuple[Annotated[int, Field(ge=1, le=MAX_STEPS)], ...] = ()
    """RL steps to profile. A Chrome trace and a table of operators are written to RUN_DIR/profile for each of them."""
    profile_ranks: tuple[Annotated[int, Field(ge=0, le=MAX_RANKS)], ...] = (0,)
    """Ranks to profile in these steps."""
    stuck_after: float = Field(1800.0, ge=0, le=MAX_SECONDS)
    """Hang timeout in seconds. If no rank enters a new phase for this long, the run reports where each rank is and stops. 0 disables the
    check. See docs/guides/slurm.md."""
    lost_after: float = Field(180.0, ge=0, le=MAX_SECONDS)
    """Seconds without a heartbeat after which a rank counts as lost, because it is suspended or its node cannot be reached. The run then
    stops with one line. 0 disables the check."""
