"""Asynchronous rollouts: groups of later steps are generated a bounded number of versions ahead of the trainer, without a barrier.

    trainer, max_staleness = 1 | train on 0 |   wait   | sync 1 | train on 1 | sync 2 | ...
    groups in the engines      | ...........step 1..........->  | .....step 2.....    | ...
                                              step 2 begins ^ when the engines hold version 1; both run until step 1's last group ends

The groups of step v begin when the engines hold version v - max_staleness, so no token is older than that. With 0, only the proof of the
weights, an evaluation and a checkpoint run at the same time. Groups do not wait for those of earlier steps: while the longest responses of
a step still run, if necessary across weight updates, the groups of later steps fill the engines.

The trainer takes groups in the order in which they were drawn. The groups of a step therefore do not depend on their lengths, and every
problem is trained on once. No other order keeps the staleness bound.

If the engines are lost, finished groups are kept and the other groups are sampled again (`megatron_rl.sync.recovery`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.errors import EngineLostError
from megatron_rl.rollout.worker import WAIT, RolloutBatch, RolloutWorker, StepDraw


@dataclass
class _Step:
    """A step in progress."""

    draw: StepDraw
    rollout: Future[RolloutBatch]


class AsyncRolloutWorker:
    """A `RolloutWorker` that generates in background threads, on rank 0. All calls must come from a single thread."""

    def __init__(self, worker: RolloutWorker, max_staleness: int, steps: int, stop_engine: Callable[[], None]) -> None:
        """Args:
        steps: The last version of the run, for which nothing is generated.
        stop_engine: Makes running requests fail, see `close`.
        """
        self._worker, self._max_staleness, self._steps, self._stop_engine = worker, max_staleness, steps, stop_engine
        self._threads = ThreadPoolExecutor(max_staleness + 1, thread_name_prefix="megatron-rl-rollout")  # one per step
        self._pending: deque[_Step] = deque()

    def begin(self, version: int) -> None:
        """Start generating everything that the trainer may train on when it is at `version`."""
        for step in self._pending:
            if step.rollout.done() and isinstance(step.rollout.exception(), EngineLostError):
                self._start(step)  # it failed while nobody waited, and a sync has replaced the engine since
        newest = self._pending[-1].draw.version if self._pending else version - 1
        for later in range(newest + 1, min(version + self._max_staleness, self._steps - 1) + 1):
            self._pending.append(_Step(self._worker.draw(later), Future()))
            self._start(self._pending[-1])

    def collect(self, version: int) -> RolloutBatch:
        """Return the groups for the trainer at `version`, and start generating the groups of later steps. `time/generate` is the time
        waited here, `ahead/generate` and `ahead/reward` the time that sampling and scoring took. Raise the error of the generating
        threads. After an EngineLostError, call `collect` again once the engines serve again."""
        start = time.perf_counter()
        self.begin(version)
        step = self._pending[0]
        assert step.draw.version == version, f"the groups for version {step.draw.version} are next, not those for {version}"
        try:
            rollout = step.rollout.result()
        except EngineLostError:
            wait([step.rollout for step in self._pending])  # they have ended or are lost too, so that one loss is recovered once
            raise
        self._pending.popleft()
        sampling = rollout.sampling | self._worker.observe(rollout)  # here and in order, because the next draw may depend on it
        return replace(rollout, sampling=sampling, seconds={WAIT: time.perf_counter() - start, **rollout.seconds})

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the state of the problem stream after the last collected groups. Groups generated ahead are lost
        when the run stops."""
        return self._worker.snapshot([step.draw for step in self._pending])

    def evaluate(self, version: int) -> RolloutBatch:
        """See `RolloutWorker.evaluate`. Generation ahead shares the engines meanwhile."""
        return self._worker.evaluate(version)

    def close(self) -> None:
        """Abort running requests together with the engines, and wait for the threads to end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._worker.close()
        self._stop_engine()
        self._threads.shutdown(wait=True)

    def _start(self, step: _Step) -> None:
        step.rollout = self._threads.submit(self._worker.collect, step.draw)
