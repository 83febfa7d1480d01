"""Generation that goes on while the trainer trains: the groups of the steps to come, made in a thread, at most so many versions ahead.

    trainer     | train on 0 | sync 1 | train on 1 | sync 2 | ...
    this thread |    rollout 1        |     rollout 2       | ...

The groups for the trainer at version v begin when it stands at version v - max_staleness, so no token of them can be older than that.
One rollout is made after the other: the problems keep their order, and none is skipped or used twice by a run that goes on. Where the
engine is lost, what it was making is made anew (`megatron_rl.sync.recovery`), and nothing after it before that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.rollout.worker import RolloutBatch, RolloutWorker


class AsyncRolloutWorker:
    """Stands in for a `RolloutWorker`, on rank 0. One thread of its own makes the groups; all calls come from one other."""

    def __init__(self, worker: RolloutWorker, max_staleness: int, steps: int, stop_engine: Callable[[], None]) -> None:
        """`steps`: the run's last version, for which nothing is generated. `stop_engine` makes requests that run fail; see `close`."""
        self._worker, self._max_staleness, self._steps, self._stop_engine = worker, max_staleness, steps, stop_engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-rollout")
        self._pending: deque[tuple[int, Future[tuple[RolloutBatch, dict[str, Any]]]]] = deque()
        self._stream_state = worker.state_dict()
        self._failure: BaseException | None = None

    def collect(self, version: int) -> RolloutBatch:
        """The groups for the trainer at `version`, which the engine serves by now; lets those of later steps begin.

        `time/generate` is how long they were waited for, `ahead/generate` and `ahead/reward` how long they took. Raises what went wrong
        while they were made; after an EngineLostError, and once the engine serves again, they may be collected anew.
        """
        start = time.perf_counter()
        if isinstance(self._failure, EngineLostError):
            self._drop_failed()  # the engine was lost while nobody waited, and has been brought back by a sync since
        newest = self._pending[-1][0] if self._pending else version - 1
        for wanted in range(newest + 1, min(version + self._max_staleness, self._steps - 1) + 1):
            self._pending.append((wanted, self._thread.submit(self._collect_in_thread, wanted)))
        made_for, future = self._pending.popleft()
        assert made_for == version, f"the groups for version {made_for} are next, not those for {version}"
        try:
            rollout, self._stream_state = future.result()
        except RunError:
            self._drop_failed()
            raise
        took = {f"ahead/{name.removeprefix('time/')}": seconds for name, seconds in rollout.seconds.items()}
        return replace(rollout, seconds={"time/generate": time.perf_counter() - start, **took})

    def state_dict(self) -> dict[str, Any]:
        """Where the problems stand after the last groups that were collected: those made ahead are lost when the run stops."""
        return self._stream_state

    def evaluate(self, version: int) -> dict[str, float]:
        """See `RolloutWorker.evaluate`; the engine shares its time between this and what is made ahead."""
        return self._worker.evaluate(version)

    def close(self) -> None:
        """Returns when nothing is made any more; what runs is broken off, with the engine."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stop_engine()
        self._thread.shutdown(wait=True)

    def _collect_in_thread(self, version: int) -> tuple[RolloutBatch, dict[str, Any]]:
        if self._failure is not None:
            raise self._failure  # the problems stand at those of the groups that failed
        try:
            return self._worker.collect(version), self._worker.state_dict()
        except BaseException as error:
            self._failure = error
            raise

    def _drop_failed(self) -> None:
        """The groups that failed, and with them all after them, are begun anew by the next `collect`."""
        self._pending = deque(entry for entry in self._pending if entry[1].exception() is None)
        self._failure = None
