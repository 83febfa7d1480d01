"""When a run's checkpoints are written, and what happens where that fails: training goes on, and older checkpoints stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import RunError
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.checkpoint.folder import checkpoint_folder
from megatron_rl.mcore.checkpoint.write import CheckpointWriter
from megatron_rl.training.resume import describe_layout
from megatron_rl.training.train_state import TrainState
from megatron_rl.versions import collect_versions
from parallel.layout import Layout


class CheckpointManager:
    """The checkpoints of one run, one under way at a time. All methods are collective; `saved`: the version the run goes on from, or -1."""

    def __init__(
        self, config: Config, layout: Layout, run: Path, actor: Actor, hf_config: dict[str, Any], notify: Callable[[str], None], saved: int
    ) -> None:
        self._config, self._layout, self._run, self._actor, self._hf_config, self._notify = config, layout, run, actor, hf_config, notify
        self._pending: CheckpointWriter | None = None
        self._newest_version = saved

    def write(self, mark: TrainState, last: bool) -> None:
        """Copies all that belongs to a policy, unless it is saved, and begins to write it. The `last` one is waited for, and where it
        fails, RunError is raised; that another one failed is said."""
        self.wait()
        if self._newest_version == mark.version:
            return
        try:
            self._newest_version, self._pending = mark.version, self._begin(mark)
            if last:
                self._finish()
        except RunError as error:
            if last:
                raise RunError(f"no checkpoint of step {mark.version}: {error}") from None
            self._notify(f"no checkpoint of step {mark.version}: {error}; the run goes on")

    def poll(self) -> None:
        """Between two steps: completes the one under way if it is written."""
        if self._pending is not None and self._pending.is_written():
            self.wait()

    def wait(self) -> None:
        """Waits for the one under way and completes it; that it failed is said."""
        if self._pending is None:
            return
        name = self._pending.folder.name
        try:
            self._finish()
        except RunError as error:
            self._notify(f"no checkpoint {name}: {error}; the run goes on")

    def _begin(self, mark: TrainState) -> CheckpointWriter:
        precision = self._config.precision.model_dump(mode="json")
        state = {
            **mark.to_dict(),
            "precision": precision,
            "layout": describe_layout(self._layout, self._config.train),
            "versions": collect_versions(),
        }
        folder, tokenizer, keep = checkpoint_folder(self._run, mark.version), self._config.model.path, self._config.checkpoint.keep
        return CheckpointWriter(folder, self._actor.model, self._hf_config, tokenizer, state, self._actor.optimizer, mark.rng_state, keep)

    def _finish(self) -> None:
        under_way, self._pending, begun, self._newest_version = self._pending, None, self._newest_version, -1
        if under_way is not None:
            under_way.finish()
            self._notify(f"checkpoint {under_way.folder}")
        self._newest_version = begun
