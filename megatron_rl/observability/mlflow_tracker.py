"""The tracker `mlflow`: MLflow, by its own package (mlflow or mlflow-skinny) and its own settings (MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_BATCH = 100
"""Parameters that MLflow takes at once; of metrics 1,000."""
_LONGEST = 6000
"""Characters of a parameter."""


class MLflow:
    """See `megatron_rl.observability.trackers.Tracker`. A resumed run is a run of its own, with the first step's number as a tag."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        from mlflow.entities import Metric, Param  # the user's own; a run that does not name it has none
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megatron-rl")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {"folder": str(folder)} | ({} if resume_step is None else {"resumed_from_step": str(resume_step)})
        self._run = self._client.create_run(number, run_name=folder.name, tags=tags).info.run_id
        parameters = [Param(field, str(value)[:_LONGEST]) for field, value in _flatten(config)]
        for first in range(0, len(parameters), _BATCH):
            self._client.log_batch(self._run, params=parameters[first : first + _BATCH])

    def log(self, row: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1e3)
        self._client.log_batch(self._run, metrics=[self._metric(name, value, now, step) for name, value in row.items()])

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run, "FINISHED" if status == "finished" else "FAILED")


def _flatten(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value
