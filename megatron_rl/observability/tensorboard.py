"""The tracker `tensorboard`: scalars in the run folder's `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """See `megatron_rl.observability.trackers.Tracker`."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        purge_step = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()
