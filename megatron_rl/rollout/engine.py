"""What the loop asks of a rollout engine. Implementations register under the entry-point group `megatron_rl.rollout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from megatron_rl.config import Config
from megatron_rl.config.sync import Running
from megatron_rl.errors import UserError
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.types import Generation, SamplingParams
from parallel.chunking import Chunk
from parallel.shards import Rect
from parallel.transport.base import Link


@dataclass(frozen=True)
class EngineTensorSpec:
    """A parameter as the running engine holds it. `dtype` is torch's name, such as float8_e4m3fn."""

    dtype: str
    shape: tuple[int, ...]


class Engine(Protocol):
    """An engine. Every call is bounded in time and raises RunError, with the engine's log tail, when the engine fails: EngineLostError
    where
    another one can take its place."""

    def wait_until_ready(self) -> None:
        """Returns when the engine serves the weights it was started with, as version 0. Raises RunError where it does not come up, and
        has ended it then."""

    def generate(self, prompts_B: Sequence[list[int]], sampling: SamplingParams | Sequence[SamplingParams]) -> list[Generation]:
        """One completion per prompt (token ids), in order; one sampling for all, or one for each."""

    def describe_tensors(self) -> list[dict[str, EngineTensorSpec]]:
        """Per engine rank, every weight it serves from."""

    def read_activation_scale_formats(self) -> dict[str, str]:
        """For every FP8 linear layer that is live, the format ("pow2" or "fp32") of the scales it quantises activations with."""

    def read_graph(self) -> list[PrecisionGraph]:
        """Per engine rank, the precision graph read from its live modules."""

    def connect(self, link: Link, chunks: Sequence[Chunk], staged: bool) -> None:
        """Every engine rank begins to connect to the trainer, to receive its share of `chunks` at every sync.

        `staged`: into a second copy of the weights, which `finish_receiving` copies over the live ones. What goes wrong with the
        connection is raised by `finish_receiving`.
        """

    def disconnect(self) -> None:
        """Ends the connection and frees the second copy."""

    def pause(self, running: Running) -> None:
        """Holds new requests and returns when no token is being sampled. What becomes of completions that run: see `sync.running`.

        Only with "continue" may a completion hold tokens of several versions; `Generation.versions_T` says which.
        """

    def resume(self) -> None:
        """Requests are served again."""

    def release_memory(self) -> None:
        """Gives back memory, of the KV cache at least and of the weights where it can. Nothing is served until the next sync, which takes
        it again and fills the weights."""

    def get_memory_mb(self) -> float:
        """MiB of host memory that its processes hold."""

    def begin_sync(self) -> None:
        """Opens a change of the live weights, between `pause` and `resume`."""

    def start_receiving(self, hashing: bool) -> None:
        """The engine ranks begin to receive, in the background."""

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        """Returns when the live weights hold all bytes. Where `hashing`: per rank, one digest per chunk, made from the live weights."""

    def end_sync(self, version: int) -> None:
        """Closes the change: from now on completions carry this policy version."""

    def digest_rects(self, wanted: Mapping[int, Sequence[tuple[str, Rect]]]) -> dict[int, list[str]]:
        """Per rank, the digests (`parallel.digest.digest`) of rectangles of live tensors, in the order asked."""

    def stop(self, force: bool = False) -> None:
        """Ends the engine's processes, politely first or at once; safe to call twice."""


class EngineLauncher(Protocol):
    """The entry point's callable: starts engine `number` of a run, without waiting for it."""

    def __call__(self, config: Config, model_path: Path, log_dir: Path, number: int = 0) -> Engine: ...


def find_engine_launcher(name: str) -> EngineLauncher:
    """The launcher registered as `name`. Raises UserError when there is none."""
    found = entry_points(group="megatron_rl.rollout")
    for entry in found:
        if entry.name == name:
            return entry.load()
    known = ", ".join(sorted(entry.name for entry in found)) or "none"
    raise UserError("rollout.engine", name, f"is not registered; known engines: {known}", "install the project: pip install --no-deps -e .")
