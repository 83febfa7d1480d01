"""The state of a run between two steps: what a checkpoint keeps besides tensors, so that a resumed run samples and computes the same.

The state is captured when a policy version is complete. Nothing changes a weight until the next optimizer step, so a run that is stopped in
between writes a checkpoint of this state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_rl.mcore.checkpoint.rng import capture_rng_state

if TYPE_CHECKING:  # loaded only by runs that replay groups
    from megatron_rl.batch.replay import KeptGroup


@dataclass(frozen=True)
class TrainState:
    version: int
    """Policy version: the number of completed RL steps."""
    optimizer_steps: int
    clip_bounds: tuple[float, float]
    data: Callable[[], dict[str, Any]]
    """Returns `ProblemStream.state_dict()` as of this version; {} on ranks other than 0."""
    unrecorded: dict[str, float] | None = None
    """Metrics of this version's row, without those of its sync and evaluation, or None once the row is written."""
    critic_steps: int = 0
    """Optimizer steps of the critic."""
    replay: tuple[KeptGroup, ...] = ()
    """Groups kept for replay; empty on ranks other than 0. A checkpoint stores them in a separate file."""
    rng_state: dict[str, Any] = field(default_factory=capture_rng_state)
    """This rank's random number generators."""

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
