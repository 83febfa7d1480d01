"""Trackers, which show a run's metrics elsewhere: TensorBoard, Weights & Biases, MLflow, or a user's own. Rank 0 only.

The run's own record is metrics.jsonl. Each built-in tracker imports its library when it starts.
"""

import copy
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.base import flatten
from megatron_rl.errors import UserError
from megatron_rl.metrics import group_by_panel
from megatron_rl.plugs import TRACKERS
from parallel.plug import describe_error

_MLFLOW_BATCH = 100  # parameters that MLflow accepts at once
_MLFLOW_LENGTH = 6000  # characters of a parameter that MLflow accepts
_MLFLOW_NAMES = r"[^/\w.\- :]", 250  # characters that no name in MLflow may have, and the length of the longest
_WANDB_NAMES = r"[^/a-zA-Z0-9_]", 250  # W&B neither sorts nor filters by others; "/" makes sections


class RefusedMetricsError(Exception):
    """Raised by a tracker that refused some metrics of a row for good, once for each metric. It has the others."""


class Tracker(Protocol):
    """The interface of a tracker (`log.trackers`). An error in `log` or `finish` is reported once and does not stop the run. A tracker that
    hangs, or that tries to end the process, is not called again."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        """Start tracking. Any exception stops the run before anything else starts.

        Args:
            folder: the run's folder.
            config: the whole config as plain data.
            resume_step: last step of the resumed run, after which everything is to be discarded, or None for a new run.
        """

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step, which may include NaN and infinities."""

    def finish(self, status: str) -> None:
        """Stop tracking. `status` is "finished" or "broken"."""


class _Names:
    """Names as a tracker accepts them, such as pass_at_4 for pass@4. Two names never become one, nor one of them the folder of another."""

    def __init__(self, refused: str, longest: int) -> None:
        """`refused`: regular expression of a character that a name may not have."""
        self._refused, self._longest, self._given = re.compile(refused), longest, dict[str, str]()

    def __getitem__(self, name: str) -> str:
        if name not in self._given:
            self._given[name] = self._choose(name)
        return self._given[name]

    def _choose(self, name: str) -> str:
        parts = self._refused.sub("_", name.replace("@", "_at_")).split("/")
        given = "/".join(part for part in parts if part.strip(".")).lstrip(".") or "_"
        taken = {*self._given.values()}
        if any(given.startswith(f"{other}/") or other.startswith(f"{given}/") for other in taken):
            given = given.replace("/", "_")
        if given in taken or len(given) > self._longest:
            given = f"{given[: self._longest - 13]}_{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
        return given


class TensorBoard:
    """Writes scalars to the run folder's `tensorboard/`, with the metrics' panels as custom scalars."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = folder / "tensorboard"
        if resume_step is not None:
            _put_before_new_files(folder)
        self._writer: Any = SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)
        panels = {panel: ["Multiline", [metric.pattern for metric in metrics]] for panel, metrics in group_by_panel().items()}
        self._writer.add_custom_scalars({"megatron-rl": panels})

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()


def _put_before_new_files(folder: Path) -> None:
    """Rename event files in their order. TensorBoard reads files in the order of their names, which begin with the second. A file of
    a resumed run would come first if the clock went back, and within one second the order is that of host, process, and counter."""
    for number, file in enumerate(sorted(folder.glob("events.out.tfevents.*"))):
        file.rename(folder / f"events.out.tfevents.{number:010d}")


class WandB:
    """Weights & Biases, configured by its own variables (WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE=offline). A resumed run is a separate W&B
    run in the group of the first, because W&B cannot discard logged steps."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        import wandb

        self._names = _Names(*_WANDB_NAMES)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron-rl"),
            group=folder.name,
            name=folder.name if resume_step is None else f"{folder.name} from {resume_step}",
            dir=folder,
            config=json.loads(json.dumps(config, default=str)),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log({self._names[name]: value for name, value in row.items()}, step=step)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """MLflow (mlflow or mlflow-skinny), configured by its own variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME). A resumed run is a
    separate MLflow run, tagged with the step it was resumed from."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        self._names, self._refused, fields = _Names(*_MLFLOW_NAMES), set[str](), _Names(*_MLFLOW_NAMES)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megatron-rl")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {"folder": str(folder)} | ({} if resume_step is None else {"resumed_from_step": str(resume_step)})
        self._run = self._client.create_run(number, run_name=folder.name, tags=tags).info.run_id
        parameters = [Param(fields[field], str(value)[:_MLFLOW_LENGTH]) for field, value in flatten(config).items()]
        for first in range(0, len(parameters), _MLFLOW_BATCH):
            self._client.log_batch(self._run, params=parameters[first : first + _MLFLOW_BATCH])

    def log(self, row: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1e3)
        metrics = [self._metric(self._names[name], value, now, step) for name, value in row.items() if name not in self._refused]
        if refused := self._send(metrics):
            self._refused |= {name for name in row if self._names[name] in refused}
            raise RefusedMetricsError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))

    def _send(self, metrics: list[Any]) -> dict[str, str]:
        """Send metrics, and return why some were refused. MLflow refuses a batch as a whole, so send its halves then."""
        from mlflow.exceptions import MlflowException

        try:
            if metrics:
                self._client.log_batch(self._run, metrics=metrics)
            return {}
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(metrics) == 1:
                return {metrics[0].key: describe_error(error)}
            half = len(metrics) // 2
            return self._send(metrics[:half]) | self._send(metrics[half:])

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run, "FINISHED" if status == "finished" else "FAILED")


class Trackers:
    """All trackers of a run. `notify` shows a line to the user."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify, self._failed = notify, set[str]()
        self._trackers: dict[str, Tracker] = {}

    def start(self, names: Sequence[str], folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        """Start all trackers. Raise UserError if one does not start."""
        for name in names:
            try:
                tracker = TRACKERS.load(name)
                self._trackers[name] = tracker(folder, copy.deepcopy(config), resume_step)
            except Exception as error:  # user code may raise anything
                rule = f"does not start ({describe_error(error)})"
                missing = isinstance(error, ModuleNotFoundError) and error.name == name
                fix = f"pip install {name}" if missing else "repair it"
                raise UserError(TRACKERS.field, name, rule, f"{fix}, or remove it from the list") from None

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._call_all(lambda tracker: tracker.log(dict(row), step))

    def finish(self, status: str) -> None:
        self._call_all(lambda tracker: tracker.finish(status))

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except RefusedMetricsError as error:
                self._notify(f"tracker {name} refuses metrics, which it will not get ({error})")
            except Exception as error:  # metrics.jsonl has the rows too, so this does not stop the run
                if name not in self._failed:
                    self._failed.add(name)
                    self._notify(f"tracker {name} failed, the run continues ({describe_error(error)})")
