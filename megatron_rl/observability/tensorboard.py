"""The tracker `tensorboard`: scalars in the run folder's `tensorboard/`, and the panels that their metrics declare as custom scalars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_rl.metrics import group_by_panel


class TensorBoard:
    """See `megatron_rl.observability.trackers.Tracker`."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=None if resume_step is None else resume_step + 1)
        panels = {panel: ["Multiline", [metric.pattern for metric in metrics]] for panel, metrics in group_by_panel().items()}
        self._writer.add_custom_scalars({"megatron-rl": panels})

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()
