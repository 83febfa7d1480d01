"""Several engines that look like one, and what becomes of one that is lost.

Requests go to the engine with the least to do. A completion's draws are a function of its seed, so it does not matter which engine that
is. Ranks are numbered through: rank r of engine e is e * rollout.tp + r, and a sync fills and proves them all.

An engine that is lost is ended and another one starts in its place at once, while the others take over its requests. It holds the
weights the run began with, so it answers nothing until a sync has filled and proved it: `wait_for_successors` waits for it, every call of
a sync
raises EngineLostError before that, and `resume` lets it serve (`megatron_rl.sync.recovery`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from megatron_rl.config import Config
from megatron_rl.config.sync import Running
from megatron_rl.errors import EngineLostError, RunError, UserError
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.rollout.engine import Engine, EngineTensorSpec, find_engine_launcher
from megatron_rl.rollout.engine_placement import get_base_gpu_id, place_engine
from megatron_rl.types import Generation, SamplingParams
from parallel.chunking import Chunk
from parallel.shards import Rect
from parallel.transport.base import Link

T = TypeVar("T")

_SPLITS_PER_ENGINE = 4
"""Requests that a batch is cut into for each engine, so that one which is early takes over from one which is late."""


def start_engines(config: Config, model_path: Path, log_dir: Path, notify: Callable[[str], None] = print) -> EnginePool:
    """Starts the engines of a configuration side by side, and returns when all are ready. Raises RunError where one is not."""
    launch = find_engine_launcher(config.rollout.engine)
    return EnginePool(config, lambda number: launch(config, model_path, log_dir, number), notify)


def check_devices(config: Config) -> None:
    """Raises UserError where a node, taken to be like this machine, has fewer GPUs than its engines need."""
    rollout, found = config.rollout, torch.cuda.device_count()
    if not torch.cuda.is_available():
        return
    if rollout.tp > found:
        raise UserError("rollout.tp", rollout.tp, f"is more than a node's {found} GPUs, and an engine has one node", "lower it")
    before = get_base_gpu_id(config, place_engine(rollout, 0))
    if before + rollout.engines_per_node * rollout.tp > found:
        share = f" / {len(rollout.hosts)} nodes" if len(rollout.hosts) > 1 else ""
        needed = f"{rollout.engines_per_node} * {rollout.tp} GPUs of a machine (rollout.engines{share} * rollout.tp)"
        beside = f" beside the trainer's {before}" if before else ""
        raise UserError("rollout.engines", rollout.engines, f"needs {needed}{beside}, this one has {found}", "lower one of them")


@dataclass(eq=False)
class _Replica:
    """One of the engines: the one that holds the place now."""

    number: int
    engine: Engine
    serving: bool = True
    outstanding: int = 0
    """Completions it was asked for and has not given yet."""
    lost: EngineLostError | None = None
    """Why there is none."""
    successor: Future[Engine] | None = None
    """The one that takes its place; None where no restart is left."""


class EnginePool:
    """See `megatron_rl.rollout.engine.Engine`, whose protocol this class has."""

    def __init__(self, config: Config, start: Callable[[int], Engine], notify: Callable[[str], None]) -> None:
        self._settings, self._start, self._notify = config.rollout, start, notify
        self._changed = threading.Condition()
        self._version = self._restarts = 0
        self._stopped = False
        self._graphs: list[list[PrecisionGraph]] = []
        # Linux ends an engine with the thread that started it (`rollout_sglang.server`), so one thread starts all, and stays
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-engines")
        self._executor = ThreadPoolExecutor(self._settings.engines, thread_name_prefix="megatron-rl-engine")
        self._replicas: list[_Replica] = []
        try:
            for number in range(self._settings.engines):
                self._replicas.append(_Replica(number, self._starter.submit(start, number).result()))
            for place in self._replicas:
                place.engine.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    # --- completions

    def generate(self, prompts_B: Sequence[list[int]], sampling: SamplingParams | Sequence[SamplingParams]) -> list[Generation]:
        """See `Engine.generate`. What an engine was asked for when it was lost is sampled by the others; EngineLostError where none is
        left."""
        samplings = [sampling] * len(prompts_B) if isinstance(sampling, SamplingParams) else sampling
        count, engines = len(prompts_B), len(self._replicas)
        size = count if engines == 1 else max(-(-count // (_SPLITS_PER_ENGINE * engines)), 1)
        pieces = [slice(start, start + size) for start in range(0, count, max(size, 1))]
        if len(pieces) <= 1:
            return self._generate(prompts_B, samplings)
        threads = ThreadPoolExecutor(len(pieces), thread_name_prefix="megatron-rl-generate")
        try:
            answers = [threads.submit(self._generate, prompts_B[piece], samplings[piece]) for piece in pieces]
            return [generation for answer in answers for generation in answer.result()]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # after an error nobody awaits what still runs

    def _generate(self, prompts_B: Sequence[list[int]], samplings: Sequence[SamplingParams]) -> list[Generation]:
        while True:
            place, engine = self._acquire_engine(len(prompts_B))
            try:
                return engine.generate(prompts_B, samplings)
            except EngineLostError as error:
                self._mark_lost(place, engine, error)
            finally:
                with self._changed:
                    place.outstanding -= len(prompts_B)
                    self._changed.notify_all()

    def _acquire_engine(self, count: int) -> tuple[_Replica, Engine]:
        """The engine with the least to do, once it has room for `count` more or nothing to do."""
        timeout, most = self._settings.request_timeout, self._settings.max_running_requests

        def has_room() -> bool:
            places = [place for place in self._replicas if place.serving]
            return len(self._replicas) == 1 or not places or any(place.outstanding + count <= max(most, count) for place in places)

        with self._changed:
            if not self._changed.wait_for(has_room, timeout):
                raise RunError(f"no engine had room for {count} more completions within {timeout:g} s (rollout.request_timeout)")
            serving = [place for place in self._replicas if place.serving]
            if not serving:
                raise next((place.lost for place in self._replicas if place.lost), EngineLostError("no engine serves"))
            place = min(serving, key=lambda place: place.outstanding)
            place.outstanding += count
            return place, place.engine

    # --- losses

    def _mark_lost(self, place: _Replica, engine: Engine, error: EngineLostError) -> None:
        """Notes a loss, once, and has another engine started in that place where a restart is left."""
        with self._changed:
            if place.engine is not engine or place.lost is not None or self._stopped:
                return
            place.serving, place.lost = False, error
            self._restarts += 1
            left = self._restarts <= self._settings.max_restarts
            place.successor = self._starter.submit(self._start_successor, place.number, engine) if left else None
            self._changed.notify_all()
        self._notify(f"engine {place.number} is lost: {error}" + ("; another one starts" if left else ""))

    def _start_successor(self, number: int, lost: Engine) -> Engine:
        lost.stop(force=True)
        return self._start(number)

    def wait_for_successors(self, reason: EngineLostError) -> int:
        """Waits until every engine that was lost has a successor, which serves from the next `resume` on; returns how many there were.

        Raises RunError where none is left of the restarts that `rollout.max_restarts` allows, which a loss that hit no engine counts
        against as well, or where a successor has another precision graph.
        """
        lost = [place for place in self._replicas if place.lost is not None]
        if not lost:
            self._restarts += 1
        for place in lost:
            while place.lost is not None:
                self._install_successor(place)
        if self._restarts > self._settings.max_restarts:
            raise RunError(_describe_restart_limit(reason, self._settings.max_restarts), reason.log_tail)
        return len(lost)

    def _install_successor(self, place: _Replica) -> None:
        assert place.lost is not None
        if place.successor is None:
            raise RunError(_describe_restart_limit(place.lost, self._settings.max_restarts), place.lost.log_tail)
        successor = place.successor.result(self._settings.start_timeout)
        with self._changed:
            place.engine, place.successor, why = successor, None, place.lost
        try:
            successor.wait_until_ready()
            graph = successor.read_graph() if self._graphs else None
        except RunError as error:
            place.lost = None
            self._mark_lost(place, successor, EngineLostError(str(error), error.log_tail))
            return
        if graph is not None and graph != self._graphs[place.number]:
            raise RunError(f"engine {place.number} has another precision graph than the one whose place it took ({why})")
        place.lost = None

    # --- the rest of the protocol

    def wait_until_ready(self) -> None:
        """They are."""

    def describe_tensors(self) -> list[dict[str, EngineTensorSpec]]:
        return [rank for ranks in self._call_all(lambda _, engine: engine.describe_tensors()) for rank in ranks]

    def read_activation_scale_formats(self) -> dict[str, str]:
        """As `Engine.read_activation_scale_formats`; names begin with the engine's number where there are several."""
        told = self._call_all(lambda _, engine: engine.read_activation_scale_formats())
        if len(told) == 1:
            return told[0]
        return {f"engine {number}: {name}": used for number, formats in enumerate(told) for name, used in formats.items()}

    def read_graph(self) -> list[PrecisionGraph]:
        self._graphs = self._call_all(lambda _, engine: engine.read_graph())
        return [graph for graphs in self._graphs for graph in graphs]

    def connect(self, link: Link, chunks: Sequence[Chunk], staged: bool) -> None:
        def connect(number: int, engine: Engine) -> None:
            first = self._first_rank(number)
            mine = [replace(chunk, target=chunk.target - first) for chunk in chunks if self._owner_of_rank(chunk.target) == number]
            engine.connect(replace(link, first=first), mine, staged)

        self._call_all(connect)

    def disconnect(self) -> None:
        for place in self._replicas:
            if place.lost is None:
                with contextlib.suppress(RunError):  # an engine that is gone holds nothing
                    place.engine.disconnect()

    def pause(self, running: Running) -> None:
        self._call_all(lambda _, engine: engine.pause(running))

    def resume(self) -> None:
        self._call_all(lambda _, engine: engine.resume())
        with self._changed:
            for place in self._replicas:
                place.serving = place.lost is None
            self._changed.notify_all()

    def release_memory(self) -> None:
        """As `Engine.release_memory`, of all that are left: one that is lost has nothing to give back, and no sync has failed by that."""
        self._call_survivors(lambda _, engine: engine.release_memory())

    def get_memory_mb(self) -> float:
        return sum(place.engine.get_memory_mb() for place in self._replicas)

    def begin_sync(self) -> None:
        self._call_all(lambda _, engine: engine.begin_sync())

    def start_receiving(self, hashing: bool) -> None:
        self._call_all(lambda _, engine: engine.start_receiving(hashing))

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        return self._merge_by_rank(self._call_all(lambda _, engine: engine.finish_receiving(hashing)))

    def end_sync(self, version: int) -> None:
        self._call_all(lambda _, engine: engine.end_sync(version))
        if version != self._version:
            self._version, self._restarts = version, 0

    def digest_rects(self, wanted: Mapping[int, Sequence[tuple[str, Rect]]]) -> dict[int, list[str]]:
        def ask(number: int, engine: Engine) -> dict[int, list[str]]:
            mine = {rank - self._first_rank(number): rects for rank, rects in wanted.items() if self._owner_of_rank(rank) == number}
            return engine.digest_rects(mine) if mine else {}

        return self._merge_by_rank(self._call_all(ask))

    def stop(self, force: bool = False) -> None:
        with self._changed:
            self._stopped = True
            for place in self._replicas:
                place.serving = False
            self._changed.notify_all()
        for place in self._replicas:
            place.engine.stop(force)
            with contextlib.suppress(Exception):  # one that was not started
                if place.successor is not None:
                    place.successor.result(self._settings.start_timeout).stop(force)
        for threads in (self._starter, self._executor):
            threads.shutdown(wait=False)

    def _call_all(self, call: Callable[[int, Engine], T]) -> list[T]:
        """`call` with every number and engine, side by side; returns when all are done. Raises EngineLostError where an engine is lost."""
        for place in self._replicas:
            if place.lost is not None:
                raise place.lost
        found, errors = self._call(self._replicas, call)
        if errors:
            raise errors[0]
        return found

    def _call_survivors(self, call: Callable[[int, Engine], None]) -> None:
        """As `_call_all` with those that are not lost, for what an engine need not do any more once it is lost."""
        for error in self._call([place for place in self._replicas if place.lost is None], call)[1]:
            if not isinstance(error, EngineLostError):
                raise error

    def _call(self, places: Sequence[_Replica], call: Callable[[int, Engine], T]) -> tuple[list[T], list[RunError]]:
        """(results, errors) of `call`, side by side; losses are noted, and come first."""
        engines = [(place, place.engine) for place in places]
        running = [self._executor.submit(call, place.number, engine) for place, engine in engines]
        found, errors = list[T](), list[RunError]()
        for (place, engine), future in zip(engines, running, strict=True):
            try:
                found.append(future.result())
            except EngineLostError as error:
                self._mark_lost(place, engine, error)
                errors.insert(0, error)
            except RunError as error:
                errors.append(error)
        return found, errors

    def _first_rank(self, number: int) -> int:
        return number * self._settings.tp

    def _owner_of_rank(self, rank: int) -> int:
        return rank // self._settings.tp

    def _merge_by_rank(self, found: Sequence[Mapping[int, T]]) -> dict[int, T]:
        return {self._first_rank(number) + rank: value for number, ranks in enumerate(found) for rank, value in ranks.items()}


def _describe_restart_limit(reason: RunError, most: int) -> str:
    return f"{reason}; no more restarts in this step (rollout.max_restarts = {most})" if most else str(reason)
