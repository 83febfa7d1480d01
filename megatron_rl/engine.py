"""What the loop asks of a rollout engine. Implementations register under the entry-point group `megatron_rl.rollout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.types import Generation, Sampling
from parallel.buckets import Bucket
from parallel.geometry import Rect


@dataclass(frozen=True)
class LiveTensor:
    """A parameter as the running engine holds it. `dtype` is torch's name, such as float8_e4m3fn."""

    dtype: str
    shape: tuple[int, ...]


class Engine(Protocol):
    """A running engine. Every call is bounded in time and raises RunError, with the engine's log tail, when the engine fails."""

    def generate(self, prompts_B: Sequence[list[int]], sampling: Sampling) -> list[Generation]:
        """One completion per prompt (token ids), in order."""

    def live_tensors(self) -> list[dict[str, LiveTensor]]:
        """Per engine rank, every weight it serves from."""

    def activation_scale_formats(self) -> dict[str, str]:
        """For every FP8 linear layer that is live, the format ("pow2" or "fp32") of the scales it quantises activations with."""

    def begin_sync(self) -> None:
        """Opens a weight update; no request may be running."""

    def write(self, segment: Path, bucket: Bucket) -> None:
        """Copies a bucket's bytes from a shared-memory file straight into the live parameters."""

    def end_sync(self, version: int) -> None:
        """Closes the update: from now on completions carry this policy version."""

    def digests(self, wanted: Mapping[int, Sequence[tuple[str, Rect]]]) -> dict[int, list[str]]:
        """Per rank, the digests (`parallel.regions.digest`) of rectangles of live tensors, in the order asked."""

    def stop(self) -> None:
        """Ends the engine's processes; safe to call twice."""


class Launcher(Protocol):
    """The entry point's callable."""

    def __call__(self, config: Config, model_path: Path, log_dir: Path) -> Engine: ...


def find_launcher(name: str) -> Launcher:
    """The launcher registered as `name`. Raises UserError when there is none."""
    found = entry_points(group="megatron_rl.rollout")
    for entry in found:
        if entry.name == name:
            return entry.load()
    known = ", ".join(sorted(entry.name for entry in found)) or "none"
    raise UserError("rollout.engine", name, f"is not registered; known engines: {known}", "install the project: pip install --no-deps -e .")
