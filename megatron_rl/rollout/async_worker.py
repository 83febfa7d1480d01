"""Asynchronous rollouts: a thread generates the groups of coming steps, a bounded number of versions ahead of the trainer.

    trainer, max_staleness = 1 | train on 0 | sync 1 | train on 1 | sync 2 | ...
    this thread                |    rollout 1        |     rollout 2       | ...

Generation for version v starts when the engine holds version v - max_staleness, so no token is older than that; with 0 only the proof of
the weights, an evaluation and a checkpoint happen meanwhile. Rollouts are generated one after the other: problems keep their order, and a
resumed run skips or repeats none. If the engine is lost, the failed rollout is generated again first (`megatron_rl.sync.recovery`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.rollout.worker import WAIT, RolloutBatch, RolloutWorker


class AsyncRolloutWorker:
    """A `RolloutWorker` that does not wait, on rank 0. One thread of its own generates; all calls must come from one other thread."""

    def __init__(self, worker: RolloutWorker, max_staleness: int, steps: int, stop_engine: Callable[[], None]) -> None:
        """`steps`: the run's last version, for which nothing is generated. `stop_engine` fails running requests; see `close`."""
        self._worker, self._max_staleness, self._steps, self._stop_engine = worker, max_staleness, steps, stop_engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-rollout")
        self._pending: deque[tuple[int, Future[tuple[RolloutBatch, dict[str, Any]]]]] = deque()
        self._stream_state = worker.state_dict()
        self._failure: BaseException | None = None

    def begin(self, version: int) -> None:
        """Start generating what the trainer may train on when it is at `version`."""
        if isinstance(self._failure, EngineLostError):
            self._drop_failed()  # lost while nobody waited; a sync has replaced the engine since
        newest = self._pending[-1][0] if self._pending else version - 1
        for later in range(newest + 1, min(version + self._max_staleness, self._steps - 1) + 1):
            self._pending.append((later, self._thread.submit(self._collect_in_thread, later)))

    def collect(self, version: int) -> RolloutBatch:
        """Return the groups for the trainer at `version`, and start generating those of later steps.

        `time/generate` is the time waited here, `ahead/generate` and `ahead/reward` the time it took. Raise the error of the generating
        thread; after an EngineLostError, once the engine serves again, call `collect` again.
        """
        start = time.perf_counter()
        self.begin(version)
        next_version, future = self._pending.popleft()
        assert next_version == version, f"the groups for version {next_version} are next, not those for {version}"
        try:
            rollout, self._stream_state = future.result()
        except RunError:
            self._drop_failed()
            raise
        return replace(rollout, seconds={WAIT: time.perf_counter() - start, **rollout.seconds})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the problem stream after the last collected groups; groups generated ahead are lost when the run stops."""
        return self._stream_state

    def evaluate(self, version: int) -> RolloutBatch:
        """See `RolloutWorker.evaluate`; generation ahead shares the engine meanwhile."""
        return self._worker.evaluate(version)

    def close(self) -> None:
        """Abort running requests, together with the engine, and return when the thread has ended."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stop_engine()
        self._thread.shutdown(wait=True)

    def _collect_in_thread(self, version: int) -> tuple[RolloutBatch, dict[str, Any]]:
        if self._failure is not None:
            raise self._failure  # the problem stream stands at the groups that failed
        try:
            return self._worker.collect(version), self._worker.state_dict()
        except BaseException as error:
            self._failure = error
            raise

    def _drop_failed(self) -> None:
        """Forget the failed groups and all after them; the next `collect` starts them again."""
        self._pending = deque(entry for entry in self._pending if entry[1].exception() is None)
        self._failure = None
