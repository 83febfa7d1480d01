"""The state of a run between two steps: what a checkpoint keeps beside the tensors, so that a resumed run draws and computes the same.

Taken when a policy version is complete. What happens after that, up to the next optimizer step, changes no weight: a run that is stopped
there writes a checkpoint of this state and goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_rl.mcore.checkpoint.rng import capture_rng_state

if TYPE_CHECKING:  # loaded where a run replays
    from megatron_rl.batch.replay import KeptGroup


@dataclass(frozen=True)
class TrainState:
    version: int
    """Policy version: RL steps done."""
    optimizer_steps: int
    clip_bounds: tuple[float, float]
    data: Callable[[], dict[str, Any]]
    """Makes `ProblemStream.state_dict()`, as it was; {} on other ranks than 0."""
    unrecorded: dict[str, float] | None = None
    """Metrics of this version's row in the log, without those of its sync and its evaluation; None once the row is written."""
    critic_steps: int = 0
    """The critic's optimizer steps."""
    replay: tuple[KeptGroup, ...] = ()
    """The groups that a later step may train on again; none on other ranks than 0. A file of their own in a checkpoint."""
    rng_state: dict[str, Any] = field(default_factory=capture_rng_state)
    """This rank's random number generators."""

    def to_dict(self) -> dict[str, Any]:
        """Return all but the random number generators and the groups, for state.json, which rank 0 writes."""
        own = {name: getattr(self, name) for name in ("optimizer_steps", "clip_bounds", "unrecorded", "critic_steps")}
        return {"step": self.version, "policy_version": self.version, "data": self.data(), **own}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> TrainState:
        """Read state.json. Raises KeyError, TypeError or ValueError if it holds no state."""
        low, high = state["clip_bounds"]
        version, steps, data = int(state["policy_version"]), int(state["optimizer_steps"]), dict(state["data"])
        return cls(version, steps, (float(low), float(high)), lambda: data, state["unrecorded"], int(state.get("critic_steps", 0)))
