"""Syncs and sampling that survive the loss of engines: `megatron_rl.rollout.engine_pool` starts a new engine, which gets the same weights.

Interrupted work is repeated. Sampling is a function of seed, policy version and position, and a repeated sync ends with the same bytes, so
a run that lost engines ends with the same bits as a run that did not.
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
from megatron_rl.sync.checks import check_live_engine
from megatron_rl.sync.report import SyncReport
from megatron_rl.sync.weight_sync import WeightSync

T = TypeVar("T")


class RecoveringWeightSync:
    """A `WeightSync` that is repeated after the loss of an engine. Every trainer rank constructs one; all methods are collective."""

    def __init__(self, sync: WeightSync, engines: Rank0[EnginePool], notify: Callable[[str], None]) -> None:
        self._sync, self._engines, self._notify = sync, engines, notify
        self._restarts, self._recovery_seconds = 0, 0.0

    def run(self, version: int, meanwhile: Callable[[], None] = lambda: None) -> SyncReport:
        """Run `WeightSync.run`. The report counts the engines lost since the last report. Raise RunError if no restart is left."""
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

    def _sync_with_recovery(self, version: int, loss: EngineLostError | None, meanwhile: Callable[[], None] = lambda: None) -> SyncReport:
        lost_at: float | None = None
        while True:
            try:
                if loss is not None:
                    check_stop()  # a cluster sends its signal to engines as well
                    hang_watchdog.enter_phase("restarting engines")
                    lost_at = lost_at or time.perf_counter()
                    self._replace_lost(loss)
                report = self._sync.run(version, meanwhile=meanwhile)
            except EngineLostError as error:
                loss = error
                continue
            if lost_at is not None:
                seconds = time.perf_counter() - lost_at
                self._recovery_seconds += seconds
                self._notify(f"engines serve policy version {version} again, proved, {seconds:.1f} s after the loss")
            return report

    def _replace_lost(self, loss: EngineLostError) -> None:
        self._sync.close()
        self._restarts += self._engines.run(lambda engines: engines.wait_for_successors(loss))
        self._engines.run(lambda engines: check_live_engine(self._sync.plan, engines))
