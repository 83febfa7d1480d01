"""Protocol of an inference engine. Implementations are registered in the entry-point group `megatron_rl.rollout`."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np

from megatron_rl.config import Config
from megatron_rl.config.sync import Running
from megatron_rl.errors import AbortedError, RunError, UserError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.hf.vocabulary import Vocabulary
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.rewards.thinking import Response
from megatron_rl.types import Generation, Problem, RemoteColumns, SamplingParams, Scored
from parallel.plug import describe_error
from parallel.shards import NamedRect
from parallel.transport.base import Link

if TYPE_CHECKING:  # it imports torch
    from megatron_rl.precision.sketch import Recording, Values


@dataclass(frozen=True)
class EngineTensorSpec:
    """A parameter in the running engine."""

    dtype: str  # torch's name, such as float8_e4m3fn
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ServedReport:
    """One engine rank's report on all tensors that it computes with."""

    derived: int = 0  # number of tensors derived from weights of the last sync, recomputed and found bitwise equal
    wrong: str = ""  # why the rank must not serve, such as the first tensor that is neither synced, derived nor constant
    tensors: int = 0  # number of weights, scales included, all of whose bytes the last sync wrote and hashed, or which are zero padding
    nbytes: int = 0  # bytes of these tensors, by their live shapes
    keeps_copies: bool = False  # whether the rank derives copies of weights when it first computes with them (`Engine.check_copies`)


class Abort:
    """Lets one thread end the current and future requests of other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requested = False
        self._running: set[Callable[[], object]] = set()

    @contextmanager
    def calling(self, end: Callable[[], object]) -> Iterator[None]:
        """Enclose a request, which calling `end` ends. Raise AbortedError if the abort has been requested already."""
        with self._lock:
            if self.requested:
                raise AbortedError
            self._running.add(end)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(end)

    def request(self) -> None:
        with self._lock:
            self.requested, running = True, list(self._running)
        for end in running:
            end()


class ParsedToolCalls(NamedTuple):
    text: str  # the response without its calls
    calls: list[tuple[str, str]]  # name and JSON arguments of each call


Places = Mapping[int, str]
"""Engine rank -> JSON [[offset, bytes], ...] of the transferred part of each of its chunks, as in `parallel.chunking.Chunk`."""
Roots = dict[int, list[int]]
"""Engine rank -> root of the digests of its chunks (`parallel.proof_root`)."""


class Engine(Protocol):
    """An inference engine. Every call is bounded in time. It raises RunError with the tail of the engine's log if the engine fails, or
    EngineLostError if another engine can replace it."""

    def wait_until_ready(self) -> None:
        """Wait until the engine is up, with its initial weights as version 0. If it does not come up, stop it and raise RunError."""

    def generate(
        self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams | Sequence[SamplingParams], abort: Abort | None = None
    ) -> list[Generation]:
        """Return one completion per prompt (int32 token ids), in order. `sampling` applies to all prompts or has one entry per prompt.
        Raise AbortedError soon after `abort` is requested."""

    def find_columns(self, by_engine: Mapping[tuple[str, str], Sequence[RemoteColumns]]) -> set[str]:
        """Return the handles of those columns that the engine still keeps; see `types.group_by_engine`."""

    def owns(self, columns: RemoteColumns) -> bool:
        """Return whether these columns were left at this engine."""

    def score(self, columns_B: Sequence[RemoteColumns], problems_B: Sequence[Problem]) -> list[Scored]:
        """Return the verdicts of the run's reward functions on completions that engines keep with their texts, in order. Raise
        EngineLostError if an engine is lost, or RunError if its workers cannot be started."""

    def read_texts(self, columns_B: Sequence[RemoteColumns]) -> list[tuple[str, Response]]:
        """Return the text of each completion, which engines keep and have scored, and its parts."""

    def parse_tool_calls(self, text: str, tools: str, parser: str) -> ParsedToolCalls | None:
        """Return the tool calls in a response, or None if the parser of that name fails. `tools`: JSON as in chat completions."""

    def separate_thought(self, text: str, parser: str) -> tuple[str, str] | None:
        """Return the thought of a response, and the rest, or None if the parser of that name fails."""

    def describe_tensors(self) -> list[dict[str, EngineTensorSpec]]:
        """Return every weight that each engine rank serves from, by name."""

    def read_activation_formats(self) -> dict[str, str]:
        """Return the format of the activation scales ("pow2" or "fp32") of every live FP8 linear layer."""

    def read_vocabulary(self) -> list[Vocabulary]:
        """Return the tokens that each engine rank knows, and those at which it ends a completion."""

    def read_graph(self) -> list[PrecisionGraph]:
        """Return the precision graph of each engine rank's live modules."""

    def connect(self, link: Link, chunks: Mapping[int, str], staged: bool) -> None:
        """Start connecting every engine rank to the trainer, to receive its chunks (`parallel.chunking.encode_chunks`) at every sync, into
        a second copy of the weights if `staged`. Connection errors are raised by `finish_receiving`."""

    def disconnect(self) -> None:
        """Close the connection and free the second copy of the weights."""

    def pause(self, running: Running) -> None:
        """Hold new requests and return when no token is being sampled. `running` (`sync.running`) decides about running completions. With
        "continue", a completion may hold tokens of several versions, listed in `Generation.versions_T`."""

    def admit(self) -> None:
        """Sample with the current weights, but hold back the answers until `resume`. If another sync comes first, sample them again."""

    def resume(self) -> None:
        """Release the answers held since `admit`, after the weights have been proved."""

    def release_memory(self) -> None:
        """Free the KV cache, and the weights if possible. The next sync allocates them again; until then nothing is served."""

    def get_memory_mb(self) -> float:
        """Return the host memory of the engine's processes in MiB."""

    def begin_sync(self) -> None:
        """Begin a change of the live weights, between `pause` and `resume`."""

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        """Start receiving weights on the engine ranks in the background. `places`: chunk offsets for delta syncs."""

    def finish_receiving(self, hashing: bool) -> Roots:
        """Wait until the live weights hold all bytes. With `hashing`, the roots are those of the live weights; else no chunk is hashed."""

    def start_rereading(self) -> None:
        """Start hashing the live weights in the background."""

    def finish_rereading(self) -> Roots:
        """Wait for `start_rereading`, and return its result."""

    def end_sync(self, version: int) -> None:
        """End the change of weights. Completions carry this policy version from now on."""

    def digest_rects(self, rects_by_rank: Mapping[int, Sequence[NamedRect]]) -> dict[int, list[str]]:
        """Return the digests (`parallel.digest.digest`) of rectangles of live tensors by rank, in the given order."""

    def account_for_tensors(self) -> list[ServedReport]:
        """Return, per engine rank, whether all that it would serve follows from the last sync: the rectangles of the chunks are its whole
        live weights except padding, and every other tensor is derived from them or constant. Call it between `end_sync` and `admit`."""

    def check_copies(self) -> list[ServedReport]:
        """Return, per engine rank, how many copies that it derived from weights since the last sync were recomputed and found equal. Called
        between `admit` and `resume`, if a rank `keeps_copies`, when the canary has been answered."""

    def answer_canary(self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams) -> list[list[Generation]]:
        """Return, per engine, one completion of exactly `max_new_tokens` tokens for each prompt. Call it between `admit` and `resume`."""

    def stop(self, force: bool = False) -> None:
        """Terminate the engine processes, sending SIGTERM first; with `force=True`, kill them immediately. Idempotent."""


@runtime_checkable
class RecordingEngine(Protocol):
    """What an engine offers beside `Engine` if `megatron-rl locate` can walk it."""

    def start_recording(self) -> None:
        """Start recording what the operators of every rank compute, in all requests."""

    def read_recording(self, ids: Sequence[int], prompt_tokens: int) -> "Recording":
        """Return the recording of the newest request whose prompt and completion are `ids`, for all tokens but the last."""

    def read_recorded_values(self, op: str, token: int) -> "list[Values]":
        """Return each rank's part of an operator's result for a token of the sequence that was read last."""

    def stop_recording(self) -> None:
        """Stop recording and drop what was recorded."""

    def find_stale_tensors(self) -> list[dict[str, str]]:
        """Return, per rank, the derived tensors that are not those of the live weights, with how they differ."""


def hash_seed(*parts: object) -> int:
    """Return a 63-bit sampling seed, a hash of the parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


def derive_engine_seed(run: int, number: int, version: int, start: int) -> int:
    """Return the 31-bit seed of an engine's own random numbers.

    Args:
        run: `train.seed`.
        number: The engine.
        version: The policy version at the start of the engine.
        start: How often this engine was started before in this launch.
    """
    return hash_seed(run, "engine", number, version, start) >> 32


def check_versions(generation: Generation, version: int, staleness: int) -> None:
    """Raise RunError if a token was sampled by a version outside of `version - staleness` to `version`."""
    remote = () if generation.remote is None else generation.remote.versions
    several = [] if generation.versions_T is None else np.unique(generation.versions_T).tolist()
    sampled_by = {generation.policy_version, *several, *remote}
    if unexpected := sampled_by - set(range(version - staleness, version + 1)):
        expected = f"the trainer holds version {version}" + (f" and takes {version - staleness} and newer" if staleness else "")
        raise RunError(f"a completion was sampled by policy version {min(unexpected)}, {expected}")


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return a turn's text up to the end of the stop text that ended it, and that stop text, or the whole text and "".

    A stop text ends a turn at the token that completes it, which may hold more text: the token `>\\n` completes the stop text `>`. The
    token stays in the sample as the engine drew it.
    """
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, ""
    end, _, stop = min(ends)
    return text[:end], stop


class EngineLauncher(Protocol):
    """Starts engines. Implemented by the object of the entry point."""

    def check(self, config: Config) -> None:
        """Raise UserError before anything starts if the configuration does not fit engines of this kind."""

    def __call__(self, config: Config, model_path: Path, log_dir: Path, number: int = 0, *, empty: bool = False, seed: int = 0) -> Engine:
        """Start engine `number` of a run without waiting for it. It loads the Hugging Face checkpoint in `model_path`. With `empty`, the
        folder has only config.json and the tokenizer, and the engine refuses requests until the first proved sync. `seed` (31 bits): of
        the engine's own random numbers, which sample where a request's seed is not used."""

    def serve(
        self, config: Config, model_path: Path, log_dir: Path, port: int, api_key: str, greeting: str, options: Mapping[str, Any]
    ) -> NoReturn:
        """Serve a checkpoint with OpenAI's interface at this port, with the parsers of `[agent]`. `options`: of requests that leave them
        out. Print `greeting` when it is up. Raise RunError if it ends by itself."""

    def fetch_columns(self, config: Config, columns_B: Sequence[RemoteColumns], routing: RoutingShape | None) -> list[Generation]:
        """Return completions whose columns engines have kept, with the columns and their prompts. Called on any rank. `routing`: shape of
        the routing records, or None without them. Raise EngineLostError if an engine is lost."""

    def rehearsal_command(self) -> list[str]:
        """Return the command that rehearses engine ranks without a GPU (`megatron_rl.rehearsal.engine_rank`)."""


def find_engine_launcher(name: str) -> EngineLauncher:
    """Return the launcher registered as `name`. Raise UserError if there is none."""
    registered = entry_points(group="megatron_rl.rollout")
    if name in registered.names:
        try:
            return registered[name].load()
        except Exception as error:  # the package may raise anything
            raise UserError("rollout.engine", name, f"cannot be imported ({describe_error(error)})", "install it, or correct it") from None
    known = ", ".join(sorted(registered.names)) or "none"
    raise UserError("rollout.engine", name, f"is not registered; known engines: {known}", "install the project: pip install --no-deps -e .")
