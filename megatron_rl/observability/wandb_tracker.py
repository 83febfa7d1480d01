"""The tracker `wandb`: Weights & Biases, by its own package and its own settings (WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE=offline)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandB:
    """See `megatron_rl.observability.trackers.Tracker`. A resumed run is a run of its own in the group of the first, from its first step
    on: what the first logged after that step stays there to be seen, as Weights & Biases never forgets a step."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        import wandb  # the user's own; a run that does not name it has none

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron-rl"),
            group=folder.name,
            name=folder.name if resume_step is None else f"{folder.name} from {resume_step}",
            dir=folder,
            config=json.loads(json.dumps(config, default=str)),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log(dict(row), step=step)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
