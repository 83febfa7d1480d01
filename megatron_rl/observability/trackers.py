"""Trackers: what shows a run's metrics elsewhere, such as TensorBoard. The run's own record is metrics.jsonl. Rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.errors import UserError
from megatron_rl.plugs import TRACKERS


class Tracker(Protocol):
    """What `log.trackers` names. After an error in `log` or `finish`, which is told once, the run goes on and so do its calls."""

    def __init__(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        """Start: the run's folder and whole configuration; in a resumed run its last step, after which all is to be forgotten, else None.
        Whatever it raises ends the run before anything else has started."""

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Record a step's metrics, NaN and infinities among them."""

    def finish(self, status: str) -> None:
        """End; "finished" or "broken"."""


class Trackers:
    """The trackers of a run. `say` tells the user a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._failed = say, set[str]()
        self._trackers: dict[str, Tracker] = {}

    def start(self, names: Sequence[str], folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        """Raise UserError for one that does not start."""
        for name in names:
            try:
                self._trackers[name] = TRACKERS.load(name)(folder, config, resume_step)
            except Exception as error:  # whatever it raises
                rule = f"does not start ({type(error).__name__}: {_first_line(error)})"
                missing = isinstance(error, ModuleNotFoundError) and error.name == name
                fix = f"pip install {name}" if missing else "repair it"
                raise UserError(TRACKERS.field, name, rule, f"{fix}, or leave it out") from None

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._call_all(lambda tracker: tracker.log(row, step))

    def finish(self, status: str) -> None:
        self._call_all(lambda tracker: tracker.finish(status))

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:  # its rows are in metrics.jsonl as well: no reason to stop a run
                if name not in self._failed:
                    self._failed.add(name)
                    self._say(f"tracker {name} failed, the run goes on ({type(error).__name__}: {error})")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
