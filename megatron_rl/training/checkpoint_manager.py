"""The state of a run between steps, and its checkpoints. If a checkpoint fails, training continues and older checkpoints stay."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config import Config
from megatron_rl.config.hub import HubModel
from megatron_rl.errors import RunError
from megatron_rl.mcore.actor import Actor, Critic
from megatron_rl.mcore.checkpoint.async_save import OtherFiles
from megatron_rl.mcore.checkpoint.checkpointing import CheckpointWriter, capture_rng_state
from megatron_rl.mcore.checkpoint.folder import checkpoint_folder
from megatron_rl.training.resume import describe_layout
from megatron_rl.versions import collect_versions
from parallel.layout import Layout

if TYPE_CHECKING:  # loaded only by runs that replay groups
    from megatron_rl.batch.replay import KeptGroup


@dataclass(frozen=True)
class TrainState:
    """The state of a run between two steps: what a checkpoint keeps besides tensors, so that a resumed run samples and computes the same.

    It is captured when a policy version is complete. Nothing changes a weight until the next optimizer step, so a run that is stopped in
    between writes a checkpoint of this state.
    """

    version: int  # policy version: the number of completed RL steps
    optimizer_steps: int
    clip_bounds: tuple[float, float]
    data: Callable[[], dict[str, Any]]  # returns `ProblemStream.state_dict()` as of this version; {} on ranks other than 0
    unrecorded: dict[str, float] | None = None
    """Metrics of this version's row, without those of its sync and evaluation, or None once the row is written."""
    critic_steps: int = 0  # optimizer steps of the critic
    replay: tuple[KeptGroup, ...] = ()  # groups kept for replay; empty on ranks other than 0. A checkpoint stores them in a separate file.
    rng_state: dict[str, Any] = field(default_factory=capture_rng_state)  # this rank's random number generators

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of state.json, which rank 0 writes: everything except random number generators and groups."""
        own = {name: getattr(self, name) for name in ("optimizer_steps", "clip_bounds", "unrecorded", "critic_steps")}
        return {"step": self.version, "policy_version": self.version, "data": self.data(), **own}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> TrainState:
        """Parse the contents of state.json. Raises KeyError, TypeError, or ValueError if they are not a state."""
        low, high = state["clip_bounds"]
        version, steps, data = int(state["policy_version"]), int(state["optimizer_steps"]), dict(state["data"])
        return cls(version, steps, (float(low), float(high)), lambda: data, state["unrecorded"], int(state.get("critic_steps", 0)))


class CheckpointManager:
    """Writes the checkpoints of one run, one at a time. All methods are collective. `saved` is the policy version that the run resumes
    from, or -1."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        run: Path,
        actor: Actor,
        hf_config: dict[str, Any],
        notify: Callable[[str], None],
        saved: int,
        critic: Critic | None = None,
    ) -> None:
        self._config, self._layout, self._run, self._actor, self._hf_config, self._notify = config, layout, run, actor, hf_config, notify
        self._critic = critic
        self._writer: CheckpointWriter | None = None
        self._newest_version = saved
        """Policy version of the newest checkpoint, complete or in progress, or -1."""

    def write(self, state: TrainState, last: bool) -> None:
        """Start writing a checkpoint unless this version is saved already.

        The `last` checkpoint is waited for, and its failure raises RunError; the failure of any other checkpoint is only reported.

        Raises:
            RunError: also if the weights are between two policy versions, because no run could resume from there.
        """
        self.wait()
        critic_steps = state.critic_steps if self._critic is None else self._critic.steps_done
        if (self._actor.steps_done, critic_steps) != (state.optimizer_steps, state.critic_steps):
            raise RunError(f"the weights are between policy versions {state.version} and {state.version + 1}")
        if self._newest_version == state.version:
            return
        try:
            self._newest_version, self._writer = state.version, self._begin(state)
            if last:
                self._finish(self._writer)
        except RunError as error:
            if last:
                raise RunError(f"no checkpoint of step {state.version}: {error}") from None
            self._notify(f"no checkpoint of step {state.version}: {error}; the run continues")

    def poll(self) -> None:
        """Complete the checkpoint in progress if all its bytes are written. Called between two steps."""
        if self._writer is not None and self._writer.is_written():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint in progress and complete it; report its failure."""
        if self._writer is None:
            return
        name = self._writer.folder.name
        try:
            self._finish(self._writer)
        except RunError as error:
            self._notify(f"no checkpoint {name}: {error}; the run continues")

    def _begin(self, state: TrainState) -> CheckpointWriter:
        saved = {
            **state.to_dict(),
            "precision": self._config.precision.model_dump(mode="json"),
            "layout": describe_layout(self._layout, self._config.train),
            "versions": collect_versions(),
        }
        if self._config.lora is not None:
            path = self._config.model.path
            base = str(path) if HubModel.parse(path) else os.path.abspath(path)  # whoever reads it may be in another folder
            saved |= {"lora": self._config.lora.model_dump(mode="json"), "base": base}
        folder, tokenizer, keep = checkpoint_folder(self._run, state.version), self._config.model.folder, self._config.checkpoint.keep
        actor, critic = self._actor, None if self._critic is None else (self._critic.model, self._critic.optimizer)
        files: list[OtherFiles] = []
        if state.replay:
            from megatron_rl.batch.replay import ReplayFile

            files.append(ReplayFile(state.replay))
        optimizer, rng = actor.optimizer, state.rng_state
        return CheckpointWriter(folder, actor.model, self._hf_config, tokenizer, saved, optimizer, rng, keep, critic, files)

    def _finish(self, writer: CheckpointWriter) -> None:
        """Complete a checkpoint. If that fails, its version counts as not saved."""
        version = self._newest_version
        self._writer, self._newest_version = None, -1
        writer.finish()
        self._notify(f"checkpoint {writer.folder}")
        self._newest_version = version
