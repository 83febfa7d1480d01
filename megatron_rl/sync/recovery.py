"""Syncs, and the sampling on rank 0, that survive the loss of engines: a new engine gets the same policy version.

What the loss interrupted is repeated. Sampling is a function of seed, policy version and position, and a sync ends with the same bytes
however often it is begun, so a run that lost engines ends with the bits of one that did not. `megatron_rl.rollout.engine_pool` is the
engines' side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from megatron_rl.distributed import Rank0
from megatron_rl.errors import EngineLostError
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.signals import check_stop
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.engine_check import check_live_engine
from megatron_rl.sync.report import SyncReport
from megatron_rl.sync.weight_sync import WeightSync

T = TypeVar("T")


class RecoveringWeightSync:
    """A `WeightSync` that is repeated. Every trainer rank constructs one; all methods are collective."""

    def __init__(self, sync: WeightSync, engines: Rank0[EnginePool], notify: Callable[[str], None]) -> None:
        self._sync, self._engines, self._notify = sync, engines, notify
        self._restarts, self._recovery_seconds = 0, 0.0
        self._lost_at: float | None = None

    def run(self, version: int, meanwhile: Callable[[], None] = lambda: None) -> SyncReport:
        """Sync as `WeightSync.run`; the report counts the losses since the previous report. Raise RunError where no restart is left."""
        report = self._sync_with_recovery(version, None, meanwhile)
        report = replace(report, restarts=self._restarts, recovery_seconds=self._recovery_seconds)
        self._restarts, self._recovery_seconds = 0, 0.0
        return report

    def run_with_recovery(self, version: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which every rank calls; repeat it if engines, which hold `version`, are lost meanwhile."""
        while True:
            try:
                return work()
            except EngineLostError as error:
                self._sync_with_recovery(version, error)

    def _sync_with_recovery(
        self, version: int, loss: EngineLostError | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> SyncReport:
        while True:
            try:
                if loss is not None:
                    self._replace_lost(loss)
                report = self._sync.run(version, meanwhile=meanwhile)
            except EngineLostError as error:
                loss = error
                continue
            if self._lost_at is not None:
                seconds = time.perf_counter() - self._lost_at
                self._lost_at, self._recovery_seconds = None, self._recovery_seconds + seconds
                self._notify(f"engines serve policy version {version} again, proved, {seconds:.1f} s after the loss")
            return report

    def _replace_lost(self, loss: EngineLostError) -> None:
        check_stop()  # a cluster's signal goes to engines as well
        hang_watchdog.enter_phase("restarting engines")
        self._lost_at = self._lost_at or time.perf_counter()
        self._sync.close()
        self._restarts += self._engines.run(lambda engines: engines.wait_for_successors(loss))
        self._engines.run(lambda engines: check_live_engine(self._sync.plan, engines))
