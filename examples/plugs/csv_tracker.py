"""A tracker: writes metrics.csv to the run folder, one line per step and metric.

[log]
trackers = ["tensorboard", "examples.plugs.csv_tracker:CsvTracker"]
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CsvTracker:
    """See `megatron_rl.observability.trackers.Tracker`."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        path = folder / "metrics.csv"
        with path.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            kept = [row for row in csv.reader(file) if resume_step is not None and row[0].isdigit() and int(row[0]) <= resume_step]
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerows([("step", "metric", "value"), *kept])

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._writer.writerows((step, name, value) for name, value in row.items())
        self._file.flush()

    def finish(self, status: str) -> None:
        self._file.close()
