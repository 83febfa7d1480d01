"""Several engines that look like one, and what becomes of one that is lost.

Requests go to the engine with the least to do. A completion's draws are a function of its seed, so it does not matter which engine that
is. Ranks are numbered through: rank r of engine e is e * rollout.tp + r, and a sync fills and proves them all.

An engine that is lost is ended and another one starts in its place at once, while the others take over its requests. It holds the
weights the run began with, so it answers nothing until a sync has filled and proved it: `revive` waits for it, every call of a sync
raises LostError before that, and `resume` lets it serve (`megatron_rl.sync.recovery`).
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
from megatron_rl.errors import LostError, RunError, UserError
from megatron_rl.precision.graph.graph import Graph
from megatron_rl.rollout.engine import Engine, LiveTensor, find_launcher
from megatron_rl.rollout.engine_placement import first_device, slot_of
from megatron_rl.types import Generation, Sampling
from parallel.chunking import Chunk
from parallel.shards import Rect
from parallel.transport.base import Link

T = TypeVar("T")

_PIECES = 4
"""Requests that a batch is cut into for each engine, so that one which is early takes over from one which is late."""


def start_engines(config: Config, model_path: Path, log_dir: Path, say: Callable[[str], None] = print) -> Engines:
    """Starts the engines of a configuration side by side, and returns when all are ready. Raises RunError where one is not."""
    launch = find_launcher(config.rollout.engine)
    return Engines(config, lambda number: launch(config, model_path, log_dir, number), say)


def check_devices(config: Config) -> None:
    """Raises UserError where a node, taken to be like this machine, has fewer GPUs than its engines need."""
    rollout, found = config.rollout, torch.cuda.device_count()
    if not torch.cuda.is_available():
        return
    if rollout.tp > found:
        raise UserError("rollout.tp", rollout.tp, f"is more than a node's {found} GPUs, and an engine has one node", "lower it")
    before = first_device(config, slot_of(rollout, 0))
    if before + rollout.engines_per_node * rollout.tp > found:
        share = f" / {len(rollout.hosts)} nodes" if len(rollout.hosts) > 1 else ""
        needed = f"{rollout.engines_per_node} * {rollout.tp} GPUs of a machine (rollout.engines{share} * rollout.tp)"
        beside = f" beside the trainer's {before}" if before else ""
        raise UserError("rollout.engines", rollout.engines, f"needs {needed}{beside}, this one has {found}", "lower one of them")


@dataclass(eq=False)
class _Place:
    """One of the engines: the one that holds the place now."""

    number: int
    engine: Engine
    serving: bool = True
    outstanding: int = 0
    """Completions it was asked for and has not given yet."""
    lost: LostError | None = None
    """Why there is none."""
    coming: Future[Engine] | None = None
    """The one that takes its place; None where no restart is left."""


class Engines:
    """See `megatron_rl.rollout.engine.Engine`, whose protocol this class has."""

    def __init__(self, config: Config, start: Callable[[int], Engine], say: Callable[[str], None]) -> None:
        self._settings, self._start, self._say = config.rollout, start, say
        self._changed = threading.Condition()
        self._version = self._restarts = 0
        self._stopped = False
        self._graphs: list[list[Graph]] = []
        # Linux ends an engine with the thread that started it (`rollout_sglang.server`), so one thread starts all, and stays
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-engines")
        self._side_by_side = ThreadPoolExecutor(self._settings.engines, thread_name_prefix="megatron-rl-engine")
        self._places: list[_Place] = []
        try:
            for number in range(self._settings.engines):
                self._places.append(_Place(number, self._starter.submit(start, number).result()))
            for place in self._places:
                place.engine.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    # --- completions

    def generate(self, prompts_B: Sequence[list[int]], sampling: Sampling | Sequence[Sampling]) -> list[Generation]:
        """See `Engine.generate`. What an engine was asked for when it was lost is sampled by the others; LostError where none is left."""
        samplings = [sampling] * len(prompts_B) if isinstance(sampling, Sampling) else sampling
        count, engines = len(prompts_B), len(self._places)
        size = count if engines == 1 else max(-(-count // (_PIECES * engines)), 1)
        pieces = [slice(start, start + size) for start in range(0, count, max(size, 1))]
        if len(pieces) <= 1:
            return self._generate(prompts_B, samplings)
        threads = ThreadPoolExecutor(len(pieces), thread_name_prefix="megatron-rl-generate")
        try:
            answers = [threads.submit(self._generate, prompts_B[piece], samplings[piece]) for piece in pieces]
            return [generation for answer in answers for generation in answer.result()]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # after an error nobody awaits what still runs

    def _generate(self, prompts_B: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[Generation]:
        while True:
            place, engine = self._choose(len(prompts_B))
            try:
                return engine.generate(prompts_B, samplings)
            except LostError as error:
                self._lose(place, engine, error)
            finally:
                with self._changed:
                    place.outstanding -= len(prompts_B)
                    self._changed.notify_all()

    def _choose(self, count: int) -> tuple[_Place, Engine]:
        """The engine with the least to do, once it has room for `count` more or nothing to do."""
        timeout, most = self._settings.request_timeout, self._settings.max_running_requests

        def has_room() -> bool:
            places = [place for place in self._places if place.serving]
            return len(self._places) == 1 or not places or any(place.outstanding + count <= max(most, count) for place in places)

        with self._changed:
            if not self._changed.wait_for(has_room, timeout):
                raise RunError(f"no engine had room for {count} more completions within {timeout:g} s (rollout.request_timeout)")
            serving = [place for place in self._places if place.serving]
            if not serving:
                raise next((place.lost for place in self._places if place.lost), LostError("no engine serves"))
            place = min(serving, key=lambda place: place.outstanding)
            place.outstanding += count
            return place, place.engine

    # --- losses

    def _lose(self, place: _Place, engine: Engine, error: LostError) -> None:
        """Notes a loss, once, and has another engine started in that place where a restart is left."""
        with self._changed:
            if place.engine is not engine or place.lost is not None or self._stopped:
                return
            place.serving, place.lost = False, error
            self._restarts += 1
            left = self._restarts <= self._settings.max_restarts
            place.coming = self._starter.submit(self._replace, place.number, engine) if left else None
            self._changed.notify_all()
        self._say(f"engine {place.number} is lost: {error}" + ("; another one starts" if left else ""))

    def _replace(self, number: int, lost: Engine) -> Engine:
        lost.stop(at_once=True)
        return self._start(number)

    def revive(self, reason: LostError) -> int:
        """Waits until every engine that was lost has a successor, which serves from the next `resume` on; returns how many there were.

        Raises RunError where none is left of the restarts that `rollout.max_restarts` allows, which a loss that hit no engine counts
        against as well, or where a successor has another precision graph.
        """
        lost = [place for place in self._places if place.lost is not None]
        if not lost:
            self._restarts += 1
        for place in lost:
            while place.lost is not None:
                self._revive(place)
        if self._restarts > self._settings.max_restarts:
            raise RunError(_no_more(reason, self._settings.max_restarts), reason.log_tail)
        return len(lost)

    def _revive(self, place: _Place) -> None:
        assert place.lost is not None
        if place.coming is None:
            raise RunError(_no_more(place.lost, self._settings.max_restarts), place.lost.log_tail)
        successor = place.coming.result(self._settings.start_timeout)
        with self._changed:
            place.engine, place.coming, why = successor, None, place.lost
        try:
            successor.wait_until_ready()
            graph = successor.graph() if self._graphs else None
        except RunError as error:
            place.lost = None
            self._lose(place, successor, LostError(str(error), error.log_tail))
            return
        if graph is not None and graph != self._graphs[place.number]:
            raise RunError(f"engine {place.number} has another precision graph than the one whose place it took ({why})")
        place.lost = None

    # --- the rest of the protocol

    def wait_until_ready(self) -> None:
        """They are."""

    def live_tensors(self) -> list[dict[str, LiveTensor]]:
        return [rank for ranks in self._on_all(lambda _, engine: engine.live_tensors()) for rank in ranks]

    def activation_scale_formats(self) -> dict[str, str]:
        """As `Engine.activation_scale_formats`; names begin with the engine's number where there are several."""
        told = self._on_all(lambda _, engine: engine.activation_scale_formats())
        if len(told) == 1:
            return told[0]
        return {f"engine {number}: {name}": used for number, formats in enumerate(told) for name, used in formats.items()}

    def graph(self) -> list[Graph]:
        self._graphs = self._on_all(lambda _, engine: engine.graph())
        return [graph for graphs in self._graphs for graph in graphs]

    def connect(self, link: Link, chunks: Sequence[Chunk], staged: bool) -> None:
        def connect(number: int, engine: Engine) -> None:
            first = self._first(number)
            mine = [replace(chunk, target=chunk.target - first) for chunk in chunks if self._owner(chunk.target) == number]
            engine.connect(replace(link, first=first), mine, staged)

        self._on_all(connect)

    def disconnect(self) -> None:
        for place in self._places:
            if place.lost is None:
                with contextlib.suppress(RunError):  # an engine that is gone holds nothing
                    place.engine.disconnect()

    def pause(self, running: Running) -> None:
        self._on_all(lambda _, engine: engine.pause(running))

    def resume(self) -> None:
        self._on_all(lambda _, engine: engine.resume())
        with self._changed:
            for place in self._places:
                place.serving = place.lost is None
            self._changed.notify_all()

    def release(self) -> None:
        """As `Engine.release`, of all that are left: one that is lost has nothing to give back, and no sync has failed by that."""
        self._on_those_left(lambda _, engine: engine.release())

    def memory_mb(self) -> float:
        return sum(place.engine.memory_mb() for place in self._places)

    def begin_sync(self) -> None:
        self._on_all(lambda _, engine: engine.begin_sync())

    def start_receiving(self, hashing: bool) -> None:
        self._on_all(lambda _, engine: engine.start_receiving(hashing))

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        return self._by_rank(self._on_all(lambda _, engine: engine.finish_receiving(hashing)))

    def end_sync(self, version: int) -> None:
        self._on_all(lambda _, engine: engine.end_sync(version))
        if version != self._version:
            self._version, self._restarts = version, 0

    def digests(self, wanted: Mapping[int, Sequence[tuple[str, Rect]]]) -> dict[int, list[str]]:
        def ask(number: int, engine: Engine) -> dict[int, list[str]]:
            mine = {rank - self._first(number): rects for rank, rects in wanted.items() if self._owner(rank) == number}
            return engine.digests(mine) if mine else {}

        return self._by_rank(self._on_all(ask))

    def stop(self, at_once: bool = False) -> None:
        with self._changed:
            self._stopped = True
            for place in self._places:
                place.serving = False
            self._changed.notify_all()
        for place in self._places:
            place.engine.stop(at_once)
            with contextlib.suppress(Exception):  # one that was not started
                if place.coming is not None:
                    place.coming.result(self._settings.start_timeout).stop(at_once)
        for threads in (self._starter, self._side_by_side):
            threads.shutdown(wait=False)

    def _on_all(self, call: Callable[[int, Engine], T]) -> list[T]:
        """`call` with every number and engine, side by side; returns when all are done. Raises LostError where an engine is lost."""
        for place in self._places:
            if place.lost is not None:
                raise place.lost
        found, errors = self._on(self._places, call)
        if errors:
            raise errors[0]
        return found

    def _on_those_left(self, call: Callable[[int, Engine], None]) -> None:
        """As `_on_all` with those that are not lost, for what an engine need not do any more once it is lost."""
        for error in self._on([place for place in self._places if place.lost is None], call)[1]:
            if not isinstance(error, LostError):
                raise error

    def _on(self, places: Sequence[_Place], call: Callable[[int, Engine], T]) -> tuple[list[T], list[RunError]]:
        """(results, errors) of `call`, side by side; losses are noted, and come first."""
        engines = [(place, place.engine) for place in places]
        running = [self._side_by_side.submit(call, place.number, engine) for place, engine in engines]
        found, errors = list[T](), list[RunError]()
        for (place, engine), future in zip(engines, running, strict=True):
            try:
                found.append(future.result())
            except LostError as error:
                self._lose(place, engine, error)
                errors.insert(0, error)
            except RunError as error:
                errors.append(error)
        return found, errors

    def _first(self, number: int) -> int:
        return number * self._settings.tp

    def _owner(self, rank: int) -> int:
        return rank // self._settings.tp

    def _by_rank(self, found: Sequence[Mapping[int, T]]) -> dict[int, T]:
        return {self._first(number) + rank: value for number, ranks in enumerate(found) for rank, value in ranks.items()}


def _no_more(reason: RunError, most: int) -> str:
    return f"{reason}; no more restarts in this step (rollout.max_restarts = {most})" if most else str(reason)
