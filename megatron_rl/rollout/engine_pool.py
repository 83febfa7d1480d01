"""A pool of engines that acts as one engine and replaces lost engines. A request goes to the engine with the fewest outstanding
completions; tokens depend only on the completion's seed. Rank r of engine e is numbered e * rollout.tp + r. When an engine is lost, the
pool starts a successor and sends its requests to the other engines. The successor serves nothing until a sync has filled and proved it:
every sync call before `wait_for_successors` raises EngineLostError, and `admit` lets it serve (`megatron_rl.sync.weight_sync`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from megatron_rl.config import Config
from megatron_rl.config.sync import Running
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.hf.vocabulary import Vocabulary
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.rewards.thinking import Response
from megatron_rl.rollout.engine import (
    Abort,
    Engine,
    EngineTensorSpec,
    ParsedToolCalls,
    Places,
    Roots,
    ServedReport,
    derive_engine_seed,
    find_engine_launcher,
)
from megatron_rl.types import Generation, Problem, RemoteColumns, SamplingParams, Scored, group_by_engine
from parallel.shards import NamedRect
from parallel.transport.base import Link

T = TypeVar("T")

_SPLITS_PER_ENGINE = 4  # number of requests per engine into which a batch is split, so that fast engines take over work from slow ones


def start_engines(
    config: Config, model_path: Path, log_dir: Path, notify: Callable[[str], None] = print, *, empty: bool = False, version: int = 0
) -> EnginePool:
    """Start all engines of a configuration and return when they are ready. Raise RunError if one fails. `empty`: see `EngineLauncher`.
    `version`: the policy version with which the run goes on."""
    launch, seeds = find_engine_launcher(config.rollout.engine), dict[int, list[int]]()

    def start(number: int, version: int) -> Engine:
        known = seeds.setdefault(number, [])
        known.append(derive_engine_seed(config.train.seed, number, version, len(known)))
        return launch(config, model_path, log_dir, number, empty=empty, seed=known[-1])

    pool = EnginePool(config, start, notify, version)
    pool.seeds = seeds
    return pool


@dataclass(eq=False)
class Replica:
    """One slot of the pool. If `lost` is set, `serving` is False, and the lost engine stays until its successor takes its place."""

    number: int
    engine: Engine
    serving: bool = True
    outstanding: int = 0  # number of completions requested and not yet returned
    lost: EngineLostError | None = None  # why the engine was lost, or None while it is alive
    successor: Future[Engine] | None = None  # the engine that will replace the lost one, or None if no restart is left


class EnginePool:
    """Implements `megatron_rl.rollout.engine.Engine`. Methods without a docstring do what the protocol says on all engines."""

    seeds: Mapping[int, Sequence[int]] = MappingProxyType({})
    """Seeds of each engine's own random numbers, one for each time that it was started."""

    def __init__(self, config: Config, start: Callable[[int, int], Engine], notify: Callable[[str], None], version: int = 0) -> None:
        """`start`: starts the engine of a number at a policy version, which is first `version`."""
        self._settings, self._start, self._notify = config.rollout, start, notify
        self._changed = threading.Condition()
        self._version, self._restarts = version, 0
        self._stopped = False
        self._graphs: list[list[PrecisionGraph]] = []
        # Linux kills an engine when the thread that started it ends (`rollout_sglang.server`), so one long-lived thread starts all
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-engines")
        # twice as many threads as engines, because a canary is answered while another call goes to all engines
        self._executor = ThreadPoolExecutor(2 * self._settings.engines, thread_name_prefix="megatron-rl-engine")
        self.replicas: list[Replica] = []
        try:
            for number in range(self._settings.engines):
                self.replicas.append(Replica(number, self._starter.submit(start, number, version).result()))
            for replica in self.replicas:
                replica.engine.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def generate(
        self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams | Sequence[SamplingParams], abort: Abort | None = None
    ) -> list[Generation]:
        """See `Engine.generate`. Requests of a lost engine go to the other engines. Raise EngineLostError if none is left."""
        samplings = [sampling] * len(prompts_B) if isinstance(sampling, SamplingParams) else sampling
        count, engines = len(prompts_B), len(self.replicas)
        # groups are not split, because their completions share the cached prompt
        size = count if engines == 1 else max(-(-count // (_SPLITS_PER_ENGINE * engines)), self._settings.group_size)
        slices = [slice(start, start + size) for start in range(0, count, max(size, 1))]

        def generate(part: slice) -> list[Generation]:
            prompts = prompts_B[part]
            return self._ask(len(prompts), lambda engine: engine.generate(prompts, samplings[part], abort))

        if len(slices) <= 1:
            return generate(slice(None))
        threads = ThreadPoolExecutor(len(slices), thread_name_prefix="megatron-rl-generate")
        try:
            return [generation for part in threads.map(generate, slices) for generation in part]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # after an error, do not wait for the rest

    def find_columns(self, by_engine: Mapping[tuple[str, str], Sequence[RemoteColumns]]) -> set[str]:
        """See `Engine.find_columns`. Lost engines keep nothing."""
        survivors = [replica for replica in self.replicas if replica.lost is None]
        found, errors = self._call(survivors, lambda _, engine: engine.find_columns(by_engine))
        for error in errors:
            if not isinstance(error, EngineLostError):
                raise error
        return set(chain.from_iterable(found))

    def owns(self, columns: RemoteColumns) -> bool:
        return any(replica.lost is None and replica.engine.owns(columns) for replica in self.replicas)

    def score(self, columns_B: Sequence[RemoteColumns], problems_B: Sequence[Problem]) -> list[Scored]:
        problems = {columns.handle: problem for columns, problem in zip(columns_B, problems_B, strict=True)}
        return self._ask_owners(columns_B, lambda engine, own: engine.score(own, [problems[columns.handle] for columns in own]))

    def read_texts(self, columns_B: Sequence[RemoteColumns]) -> list[tuple[str, Response]]:
        return self._ask_owners(columns_B, lambda engine, own: engine.read_texts(own))

    def _ask_owners(self, columns_B: Sequence[RemoteColumns], call: Callable[[Engine, list[RemoteColumns]], list[T]]) -> list[T]:
        """Return the answers of the engines that keep these columns, in order. Raise EngineLostError if one is lost."""
        answers = dict[str, T]()
        for own in group_by_engine(columns_B).values():
            answers |= zip((columns.handle for columns in own), self._ask_owner(own, call), strict=True)
        return [answers[columns.handle] for columns in columns_B]

    def _ask_owner(self, own: list[RemoteColumns], call: Callable[[Engine, list[RemoteColumns]], list[T]]) -> list[T]:
        for replica in self.replicas:
            engine = replica.engine
            if replica.lost is None and engine.owns(own[0]):
                try:
                    return call(engine, own)
                except EngineLostError as error:
                    self._mark_lost(replica, engine, error)
                    raise
        raise EngineLostError(f"the engine at {own[0].url} is lost with the completions that it kept")

    def parse_tool_calls(self, text: str, tools: str, parser: str) -> ParsedToolCalls | None:
        return self._ask(0, lambda engine: engine.parse_tool_calls(text, tools, parser))

    def separate_thought(self, text: str, parser: str) -> tuple[str, str] | None:
        return self._ask(0, lambda engine: engine.separate_thought(text, parser))

    def _ask(self, count: int, call: Callable[[Engine], T]) -> T:
        """Return one engine's answer to a request of `count` completions. If that engine is lost, ask another one."""
        while True:
            replica, engine = self._acquire_engine(count)
            try:
                return call(engine)
            except EngineLostError as error:
                self._mark_lost(replica, engine, error)
            finally:
                with self._changed:
                    replica.outstanding -= count
                    self._changed.notify_all()

    def _acquire_engine(self, count: int) -> tuple[Replica, Engine]:
        """Wait until an engine is idle or has room for `count` more completions. Return the one with the fewest outstanding completions."""
        timeout, limit = self._settings.request_timeout, self._settings.max_running_requests

        def has_room() -> bool:
            replicas = [replica for replica in self.replicas if replica.serving]
            return len(self.replicas) == 1 or not replicas or any(replica.outstanding + count <= max(limit, count) for replica in replicas)

        with self._changed:
            if not self._changed.wait_for(has_room, timeout):
                raise RunError(f"no engine had room for {count} more completions within {timeout:g} s (rollout.request_timeout)")
            serving = [replica for replica in self.replicas if replica.serving]
            if not serving:
                raise next((replica.lost for replica in self.replicas if replica.lost), EngineLostError("no engine serves"))
            replica = min(serving, key=lambda replica: replica.outstanding)
            replica.outstanding += count
            return replica, replica.engine

    def _mark_lost(self, replica: Replica, engine: Engine, error: EngineLostError) -> None:
        """Record a loss once, and start a successor if a restart is left."""

        def start_successor() -> Engine:
            engine.stop(force=True)
            return self._start(replica.number, self._version)

        with self._changed:
            if replica.engine is not engine or replica.lost is not None or self._stopped:
                return
            replica.serving, replica.lost = False, error
            self._restarts += 1
            may_restart = self._restarts <= self._settings.max_restarts
            replica.successor = self._starter.submit(start_successor) if may_restart else None
            self._changed.notify_all()
        self._notify(f"engine {replica.number} is lost: {error}" + ("; another one starts" if may_restart else ""))

    def wait_for_successors(self, reason: EngineLostError) -> int:
        """Wait until every lost engine has a successor, which serves after the next `admit`. Return the number of lost engines. Raise
        RunError if `rollout.max_restarts` is used up (a lost connection counts too) or if a successor has a different precision graph."""
        lost = [replica for replica in self.replicas if replica.lost is not None]
        if not lost:
            self._restarts += 1
        for replica in lost:
            while replica.lost is not None:
                self._install_successor(replica)
        if self._restarts > self._settings.max_restarts:
            raise RunError(_describe_restart_limit(reason, self._settings.max_restarts), reason.log_tail)
        return len(lost)

    def _install_successor(self, replica: Replica) -> None:
        assert replica.lost is not None
        if replica.successor is None:
            raise RunError(_describe_restart_limit(replica.lost, self._settings.max_restarts), replica.lost.log_tail)
        successor = replica.successor.result(self._settings.start_timeout)
        with self._changed:
            replica.engine, replica.successor, reason = successor, None, replica.lost
        try:
            successor.wait_until_ready()
            graph = successor.read_graph() if self._graphs else None
        except RunError as error:
            replica.lost = None
            self._mark_lost(replica, successor, EngineLostError(str(error), error.log_tail))
            return
        if graph is not None and graph != self._graphs[replica.number]:
            raise RunError(f"engine {replica.number} has a different precision graph than the engine that it replaced ({reason})")
        replica.lost = None

    def wait_until_ready(self) -> None:
        """Return immediately, because `__init__` has waited."""

    def describe_tensors(self) -> list[dict[str, EngineTensorSpec]]:
        return list(chain.from_iterable(self._call_all(lambda _, engine: engine.describe_tensors())))

    def read_activation_formats(self) -> dict[str, str]:
        """See `Engine.read_activation_formats`. With several engines, names begin with the engine's number."""
        formats_by_engine = self._call_all(lambda _, engine: engine.read_activation_formats())
        if len(formats_by_engine) == 1:
            return formats_by_engine[0]
        return {f"engine {number}: {name}": used for number, formats in enumerate(formats_by_engine) for name, used in formats.items()}

    def read_vocabulary(self) -> list[Vocabulary]:
        return list(chain.from_iterable(self._call_all(lambda _, engine: engine.read_vocabulary())))

    def read_graph(self) -> list[PrecisionGraph]:
        self._graphs = self._call_all(lambda _, engine: engine.read_graph())
        return list(chain.from_iterable(self._graphs))

    def connect(self, link: Link, chunks: Mapping[int, str], staged: bool) -> None:
        def connect(number: int, engine: Engine) -> None:
            engine.connect(replace(link, first=number * self._settings.tp), self._select_ranks(chunks, number), staged)

        self._call_all(connect)

    def disconnect(self) -> None:
        for replica in self.replicas:
            if replica.lost is None:
                with contextlib.suppress(RunError):  # a lost engine holds nothing
                    replica.engine.disconnect()

    def pause(self, running: Running) -> None:
        self._call_all(lambda _, engine: engine.pause(running))

    def resume(self) -> None:
        self._call_all(lambda _, engine: engine.resume())

    def admit(self) -> None:
        self._call_all(lambda _, engine: engine.admit())
        with self._changed:
            for replica in self.replicas:
                replica.serving = replica.lost is None
            self._changed.notify_all()

    def release_memory(self) -> None:
        """See `Engine.release_memory`. Lost engines have nothing to release."""
        survivors = [replica for replica in self.replicas if replica.lost is None]
        for error in self._call(survivors, lambda _, engine: engine.release_memory())[1]:
            if not isinstance(error, EngineLostError):
                raise error

    def get_memory_mb(self) -> float:
        return sum(replica.engine.get_memory_mb() for replica in self.replicas)

    def begin_sync(self) -> None:
        self._call_all(lambda _, engine: engine.begin_sync())

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        self._call_all(lambda number, engine: engine.start_receiving(hashing, places and self._select_ranks(places, number)))

    def finish_receiving(self, hashing: bool) -> Roots:
        return self._merge_by_rank(self._call_all(lambda _, engine: engine.finish_receiving(hashing)))

    def start_rereading(self) -> None:
        self._call_all(lambda _, engine: engine.start_rereading())

    def finish_rereading(self) -> Roots:
        return self._merge_by_rank(self._call_all(lambda _, engine: engine.finish_rereading()))

    def end_sync(self, version: int) -> None:
        self._call_all(lambda _, engine: engine.end_sync(version))
        if version != self._version:
            self._version, self._restarts = version, 0

    def digest_rects(self, rects_by_rank: Mapping[int, Sequence[NamedRect]]) -> dict[int, list[str]]:
        def ask(number: int, engine: Engine) -> dict[int, list[str]]:
            own_rects = self._select_ranks(rects_by_rank, number)
            return engine.digest_rects(own_rects) if own_rects else {}

        return self._merge_by_rank(self._call_all(ask))

    def account_for_tensors(self) -> list[ServedReport]:
        return list(chain.from_iterable(self._call_all(lambda _, engine: engine.account_for_tensors())))

    def check_copies(self) -> list[ServedReport]:
        return list(chain.from_iterable(self._call_all(lambda _, engine: engine.check_copies())))

    def answer_canary(self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams) -> list[list[Generation]]:
        return list(chain.from_iterable(self._call_all(lambda _, engine: engine.answer_canary(prompts_B, sampling))))

    def stop(self, force: bool = False) -> None:
        with self._changed:
            self._stopped = True
            for replica in self.replicas:
                replica.serving = False
            self._changed.notify_all()
        for replica in self.replicas:
            replica.engine.stop(force)
            with contextlib.suppress(Exception):  # the successor failed to start
                if replica.successor is not None:
                    replica.successor.result(self._settings.start_timeout).stop(force)
        for threads in (self._starter, self._executor):
            threads.shutdown(wait=False)

    def _call_all(self, call: Callable[[int, Engine], T]) -> list[T]:
        """Call `call(number, engine)` for every engine in parallel and return the results. Raise EngineLostError if an engine is lost."""
        for replica in self.replicas:
            if replica.lost is not None:
                raise replica.lost
        results, errors = self._call(self.replicas, call)
        if errors:
            raise errors[0]
        return results

    def _call(self, replicas: Sequence[Replica], call: Callable[[int, Engine], T]) -> tuple[list[T], list[RunError]]:
        """Return the results and errors of parallel calls, losses first among the errors. Record losses."""
        engines = [(replica, replica.engine) for replica in replicas]
        running = [self._executor.submit(call, replica.number, engine) for replica, engine in engines]
        results, errors = list[T](), list[RunError]()
        for (replica, engine), future in zip(engines, running, strict=True):
            try:
                results.append(future.result())
            except EngineLostError as error:
                self._mark_lost(replica, engine, error)
                errors.insert(0, error)
            except RunError as error:
                errors.append(error)
        return results, errors

    def _select_ranks(self, by_rank: Mapping[int, T], number: int) -> dict[int, T]:
        """Return the entries of an engine's ranks, numbered within the engine."""
        tp = self._settings.tp
        return {rank % tp: value for rank, value in by_rank.items() if rank // tp == number}

    def _merge_by_rank(self, by_engine: Sequence[Mapping[int, T]]) -> dict[int, T]:
        return {number * self._settings.tp + rank: value for number, ranks in enumerate(by_engine) for rank, value in ranks.items()}


def _describe_restart_limit(reason: RunError, limit: int) -> str:
    return f"{reason}; no more restarts in this step (rollout.max_restarts = {limit})" if limit else str(reason)
