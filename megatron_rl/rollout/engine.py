"""The protocol of a rollout engine. Implementations register under the entry-point group `megatron_rl.rollout`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_rl.config import Config
from megatron_rl.config.sync import Running
from megatron_rl.errors import AbortedError, UserError
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.types import Generation, SamplingParams
from parallel.chunking import Chunk
from parallel.shards import NamedRect
from parallel.transport.base import Link


@dataclass(frozen=True)
class EngineTensorSpec:
    """Dtype and shape of a parameter in the running engine. `dtype` is torch's name, such as float8_e4m3fn."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ServedReport:
    """What one engine rank says of the tensors that it computes with, all of which it has looked for."""

    derived: int = 0
    """Made from what the last sync wrote: made again, and the same bit by bit."""
    constant: int = 0
    """The same as when the engine started."""
    wrong: str = ""
    """The first that is neither, nor among those that the sync wrote, and why; or what else must not be served."""


class Abort:
    """Lets one thread end the requests of others, those to come as well."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._running: set[Callable[[], None]] = set()

    @property
    def requested(self) -> bool:
        return self._requested

    @contextmanager
    def calling(self, end: Callable[[], None]) -> Iterator[None]:
        """Enclose a request that `end` ends. Raise AbortedError if the abort is requested already."""
        with self._lock:
            if self._requested:
                raise AbortedError
            self._running.add(end)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(end)

    def request(self) -> None:
        """End all requests."""
        with self._lock:
            self._requested, running = True, list(self._running)
        for end in running:
            end()


@dataclass(frozen=True)
class ParsedToolCalls:
    """What a tool parser reads in an answer."""

    text: str
    """The answer without its calls."""
    calls: list[tuple[str, str]]
    """Name and arguments, which are JSON, of each call."""


Places = Mapping[int, Sequence[tuple[int, int]]]
"""Engine rank -> (offset, bytes) of what is sent of each of its chunks, as in `parallel.chunking.Chunk`."""


class Engine(Protocol):
    """An engine. Every call is bounded in time and raises RunError with the engine's log tail if the engine fails, EngineLostError if
    another engine can replace it."""

    def wait_until_ready(self) -> None:
        """Return when the engine is up, with its initial weights as version 0. If it does not come up, end it and raise RunError."""

    def generate(
        self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams | Sequence[SamplingParams], abort: Abort | None = None
    ) -> list[Generation]:
        """Return one completion per prompt (token ids, int32), in order. `sampling`: one for all prompts, or one for each.

        Raise AbortedError, soon, once `abort` is requested.
        """

    def parse_tool_calls(self, text: str, tools: str, parser: str) -> ParsedToolCalls | None:
        """Return the calls of tools in an answer, by the engine's own parser of that name; None where it fails on the text. `tools`: JSON,
        as in chat completions."""

    def describe_tensors(self) -> list[dict[str, EngineTensorSpec]]:
        """Return, per engine rank, every weight it serves from, by name."""

    def read_activation_formats(self) -> dict[str, str]:
        """Return, for every live FP8 linear layer, the format of its activation scales ("pow2" or "fp32")."""

    def read_graph(self) -> list[PrecisionGraph]:
        """Return, per engine rank, the precision graph of its live modules."""

    def connect(self, link: Link, chunks: Sequence[Chunk], staged: bool) -> None:
        """Start connecting every engine rank to the trainer, to receive its share of `chunks` at every sync.

        `staged`: receive into a second copy of the weights, which `finish_receiving` copies over the live ones. Errors of the
        connection are raised by `finish_receiving`.
        """

    def disconnect(self) -> None:
        """Close the connection and free the second copy."""

    def pause(self, running: Running) -> None:
        """Hold new requests and return when no token is being sampled. `running` decides about running completions (`sync.running`).

        Only with "continue" may a completion hold tokens of several versions; `Generation.versions_T` lists them.
        """

    def admit(self) -> None:
        """Let requests in and sample with the weights as they are, but give no answer before `resume`; where another sync comes first,
        such answers are dropped and sampled again."""

    def resume(self) -> None:
        """Give answers, after `admit`: what was moved is proved."""

    def release_memory(self) -> None:
        """Free the KV cache, and the weights where possible. The next sync allocates them again; until then nothing is served."""

    def get_memory_mb(self) -> float:
        """Return the host memory of its processes in MiB."""

    def begin_sync(self) -> None:
        """Open a change of the live weights, between `pause` and `resume`."""

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        """Let the engine ranks start to receive, in the background. `places`: where a sync sends deltas of chunks."""

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        """Return when the live weights hold all bytes. With `hashing`, return per rank one digest per chunk, of the live weights."""

    def start_rereading(self) -> None:
        """Begin to hash what the live weights hold now, in the background."""

    def finish_rereading(self) -> dict[int, list[str]]:
        """Return when that is done: per rank one digest per chunk."""

    def end_sync(self, version: int) -> None:
        """Close the change; completions carry this policy version from now on."""

    def digest_rects(self, rects_by_rank: Mapping[int, Sequence[NamedRect]]) -> dict[int, list[str]]:
        """Return, per rank, the digests (`parallel.digest.digest`) of rectangles of live tensors, in the order given."""

    def account_for_tensors(self) -> list[ServedReport]:
        """Return, per engine rank, whether all that it would serve follows from what the last sync wrote. Between `end_sync` and
        `admit`."""

    def answer_canary(self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams) -> list[list[Generation]]:
        """Return, per engine, a completion of each prompt, of exactly `max_new_tokens` tokens. Between `admit` and `resume`."""

    def stop(self, force: bool = False) -> None:
        """End the engine's processes: by SIGTERM first, or at once with `force`. Safe to call twice."""


class EngineLauncher(Protocol):
    """The entry point's object."""

    def check(self, config: Config) -> None:
        """Raise UserError for what engines of this kind cannot be told, before anything starts."""

    def __call__(self, config: Config, model_path: Path, log_dir: Path, number: int = 0, *, empty: bool = False) -> Engine:
        """Start engine `number` of a run without waiting for it.

        It loads the Hugging Face checkpoint in `model_path`; with `empty`, only config.json and tokenizer are there, and it refuses
        requests until the first sync has filled and proved its weights.
        """


def find_engine_launcher(name: str) -> EngineLauncher:
    """Return the launcher registered as `name`. Raise UserError if there is none."""
    registered = entry_points(group="megatron_rl.rollout")
    if name in registered.names:
        return registered[name].load()
    known = ", ".join(sorted(registered.names)) or "none"
    raise UserError("rollout.engine", name, f"is not registered; known engines: {known}", "install the project: pip install --no-deps -e .")
