"""The loop, on one page.

    prompts -> engine generates groups -> rewards -> advantages -> each replica gets its samples -> log-probs of actor, reference, teacher
            -> corrections -> policy loss -> optimizer steps -> blocks quantized once -> sync + proof -> next policy version

Every rank runs it; the rollout worker, and with it engines and rewards, exists on rank 0 only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_rl.algorithm.covariance import mark_high_covariance
from megatron_rl.algorithm.distillation import assign_distilled_advantages
from megatron_rl.algorithm.importance_weights import assign_corrections
from megatron_rl.config import Config
from megatron_rl.distributed import Rank0
from megatron_rl.evaluation.held_out import compute_eval_metrics
from megatron_rl.mcore.passes import reduce
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.signals import check_stop
from megatron_rl.rollout.async_worker import AsyncRolloutWorker
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.sync.recovery import RecoveringWeightSync
from megatron_rl.training.checkpoint_manager import CheckpointManager
from megatron_rl.training.policy_trainer import PolicyTrainer
from megatron_rl.training.recorder import Recorder
from megatron_rl.training.train_state import TrainState


class Loop:
    """One training run. With `resumed` it goes on from that state, in which worker, model and optimizer are already."""

    def __init__(
        self,
        config: Config,
        worker: Rank0[AsyncRolloutWorker],
        trainer: PolicyTrainer,
        sync: RecoveringWeightSync,
        recorder: Recorder,
        checkpoints: CheckpointManager,
        resumed: TrainState | None,
    ) -> None:
        self._config, self._worker, self._trainer, self._sync = config, worker, trainer, sync
        self._recorder, self._checkpoints = recorder, checkpoints
        self._next_row: dict[str, float] = {}  # measured after a step's row was written
        if resumed is not None:
            trainer.clip.bounds = resumed.clip_bounds
            if trainer.replay is not None:
                trainer.replay.groups = resumed.replay
        self._state = self._snapshot(0, {}) if resumed is None else self._snapshot(resumed.version, resumed.unrecorded)

    def run(self) -> None:
        """Run all steps that are left, after a first sync that gives the engine the starting policy under its version, 0 in a new run."""
        first, steps, every = self._state.version, self._config.train.steps, self._config.checkpoint.every
        hang_watchdog.enter_phase("sync", first)
        sync_metrics = self._run_sync(first)
        if self._state.unrecorded is not None:
            self._write_row({**self._state.unrecorded, **sync_metrics, **self._evaluate(first)})
        for step in range(first + 1, steps + 1):
            hang_watchdog.enter_phase("the start", step)
            check_stop()
            start = time.perf_counter()
            with self._recorder.profiler.step(step):
                metrics = self._step(step)
            metrics |= self._evaluate(step)
            self._write_row(metrics, time.perf_counter() - start)
            with self._recorder.phase("checkpoint", self._next_row):
                self._checkpoints.poll()
                if step == steps or (every and step % every == 0):
                    self.save(last=step == steps)

    def save(self, last: bool) -> None:
        """Write a checkpoint of the newest policy, unless it is written already; see `CheckpointManager.write`. Collective."""
        self._checkpoints.write(self._state, last)

    def _step(self, step: int) -> dict[str, float]:
        """Take one step, from prompts to a proved sync; return its metrics."""
        config, trainer, phase, version = self._config, self._trainer, self._recorder.phase, step - 1
        with phase("generate"):
            rollouts: list[RolloutBatch] = []  # of rank 0, which keeps the completions
            self._sync.run_with_recovery(version, lambda: rollouts.append(self._worker.value.collect(version)))
        trainer.take_devices()
        metrics = dict(self._next_row)
        with phase("share", metrics):
            samples = trainer.share_samples(rollouts, step)
        metrics |= samples.metrics
        with phase("logprobs", metrics):
            metrics |= trainer.compute_logprobs(samples)
        attribute = config.log.attribute_every and step % config.log.attribute_every == 0
        if attribute:
            with phase("attribute", metrics):
                trainer.attribution.measure(samples.own)
            metrics |= trainer.measure_without_replay(samples)
        metrics |= trainer.assign_late_advantages(samples)
        if trainer.critic is not None:
            with phase("values", metrics):
                metrics |= trainer.critic.assign_advantages(samples)
        metrics |= assign_distilled_advantages(samples.own, config.teacher, reduce.combine)
        metrics |= assign_corrections(samples.own, config.algorithm, reduce.combine)
        metrics |= mark_high_covariance(samples.own, config.algorithm, version, reduce.combine, reduce.gather_from_replicas)
        check_stop()
        if trainer.critic is not None:
            with phase("critic", metrics):
                metrics |= trainer.critic.update(samples)
        with phase("train", metrics):
            metrics |= trainer.update(samples, version)
        if attribute:
            metrics |= trainer.attribution.finish()
        self._recorder.write_samples(step, samples)
        trainer.leave_devices()
        self._state = self._snapshot(step, metrics)
        with phase("sync"):
            return metrics | self._run_sync(step)

    def _run_sync(self, version: int) -> dict[str, float]:
        """Bring the engines to `version`; while that is proved they sample what the next step trains on."""
        return self._sync.run(version, lambda: self._worker.run_local(lambda worker: worker.begin(version))).metrics()

    def _evaluate(self, step: int) -> dict[str, float]:
        if step % self._config.data.eval_every and step != self._config.train.steps:
            return {}
        hang_watchdog.enter_phase("eval")
        samples = self._config.eval.samples
        return self._sync.run_with_recovery(step, lambda: compute_eval_metrics(self._worker.value.evaluate(step), samples))

    def _snapshot(self, version: int, unrecorded: dict[str, float] | None) -> TrainState:
        data: list[Callable[[], dict[str, Any]]] = []
        self._worker.run_local(lambda worker: data.append(worker.snapshot()))
        trainer = self._trainer
        critic_steps = 0 if trainer.critic is None else trainer.critic.critic.steps_done
        replay, make_data = () if trainer.replay is None else trainer.replay.groups, data[0] if data else dict
        return TrainState(version, trainer.actor.steps_done, trainer.clip.bounds, make_data, unrecorded, critic_steps, replay)

    def _write_row(self, metrics: dict[str, float], seconds: float | None = None) -> None:
        self._recorder.write_row(self._state.version, metrics, seconds)
        self._state = replace(self._state, unrecorded=None)
