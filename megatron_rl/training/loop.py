"""The training loop.

    prompts -> engine generates groups -> rewards -> advantages -> replicas get their samples -> log-probs of actor, reference, teacher
            -> corrections -> policy loss -> optimizer steps -> weights quantized once -> sync and proof -> next policy version

Every rank runs the loop. The rollout worker, with its engines and reward workers, exists on rank 0 only.
"""

import time
from dataclasses import replace

from megatron_rl.algorithm.covariance import mark_high_covariance
from megatron_rl.algorithm.distillation import assign_distilled_advantages
from megatron_rl.algorithm.importance_weights import assign_corrections
from megatron_rl.config import Config
from megatron_rl.distributed import Rank0, is_rank0, run_on_rank0
from megatron_rl.evaluation.held_out import compute_eval_metrics
from megatron_rl.mcore.passes import reduce
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.signals import check_stop, stoppable, stopping
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.rollout.worker import AsyncRolloutWorker
from megatron_rl.sync.weight_sync import RecoveringWeightSync
from megatron_rl.training.checkpoint_manager import CheckpointManager, TrainState
from megatron_rl.training.policy_trainer import PolicyTrainer
from megatron_rl.training.recorder import Recorder
from megatron_rl.training.samples import StepSamples


class Loop:
    """One training run. If `resumed` is given, the worker, the model, and the optimizer already hold that state."""

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
        if resumed is not None:
            if config.algorithm.calibrate_every:
                trainer.clip.bounds = resumed.clip_bounds
            if trainer.replay is not None:
                trainer.replay.groups = resumed.replay
        self._state = self._snapshot(0, {}) if resumed is None else self._snapshot(resumed.version, resumed.unrecorded)

    def run(self) -> None:
        """Sync the starting policy to the engines, then run all remaining steps."""
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
            with self._recorder.phase("checkpoint"), stopping(at_once=False):
                self._checkpoints.poll()
                if step == steps or (every and step % every == 0):
                    self.save(last=step == steps)

    def save(self, last: bool) -> None:
        """Write a checkpoint of the newest policy unless it exists; see `CheckpointManager.write`. Collective."""
        self._checkpoints.write(self._state, last)

    def _step(self, step: int) -> dict[str, float]:
        """Run one step, from prompts to a proved sync, and return its metrics."""
        config, trainer, phase, version = self._config, self._trainer, self._recorder.phase, step - 1
        samples = self._sync.run_with_recovery(version, lambda: self._collect(step))
        trainer.take_devices()
        metrics = dict(samples.metrics)
        with phase("logprobs"):
            metrics |= trainer.compute_logprobs(samples, version)
        attribute = config.log.attribute_every and step % config.log.attribute_every == 0
        if attribute:
            with phase("attribute"):
                trainer.attribution.measure(samples.own)
            metrics |= trainer.measure_without_replay(samples)
        metrics |= trainer.assign_late_advantages(samples)
        if trainer.critic is not None:
            with phase("values"):
                metrics |= trainer.critic.assign_advantages(samples)
        metrics |= assign_distilled_advantages(samples.own, config.teacher, reduce.combine)
        metrics |= assign_corrections(samples.own, config.algorithm, reduce.combine)
        metrics |= mark_high_covariance(samples.own, config.algorithm, version, reduce.combine, reduce.gather_numbers)
        if trainer.compares_nothing(metrics):
            with phase("compare"):
                metrics |= trainer.count_compared(self._sync.ask_canary(version))
        check_stop()
        with stopping(at_once=False):  # nothing can be saved in between
            if trainer.critic is not None:
                with phase("critic"):
                    metrics |= trainer.critic.update(samples)
            with phase("train"):
                metrics |= trainer.update(samples, version)
            if attribute:
                metrics |= trainer.attribution.finish()
            self._recorder.write_samples(step, samples, trainer.compared)
            trainer.leave_devices()
            self._state = self._snapshot(step, metrics | self._recorder.seconds)
        check_stop()
        with phase("sync"):
            return metrics | self._run_sync(step)

    def _collect(self, step: int) -> StepSamples:
        """Return this rank's samples of a step. Raise EngineLostError if an engine is lost with the columns of some on their way."""
        version = step - 1

        def collect() -> RolloutBatch:
            with stoppable():
                return self._worker.value.collect(version)

        with self._recorder.phase("generate"):
            rollout = self._sync.run_with_recovery(version, lambda: Rank0(collect))
        with self._recorder.phase("share"):
            return self._trainer.share_samples(rollout, step)

    def _run_sync(self, version: int) -> dict[str, float]:
        """Sync the engines to `version`. They sample for the next step while the weights are being proved."""
        return self._sync.run(version, lambda: self._worker.run_local(lambda worker: worker.begin(version))).metrics()

    def _evaluate(self, step: int) -> dict[str, float]:
        if step % self._config.data.eval_every and step != self._config.train.steps:
            return {}
        hang_watchdog.enter_phase("eval")

        def evaluate() -> dict[str, float]:
            with stoppable():
                return compute_eval_metrics(self._worker.value.evaluate(step), self._config.eval.samples)

        return self._sync.run_with_recovery(step, lambda: run_on_rank0(evaluate, dict[str, float]))

    def _snapshot(self, version: int, unrecorded: dict[str, float] | None) -> TrainState:
        trainer = self._trainer
        critic_steps = 0 if trainer.critic is None else trainer.critic.critic.steps_done
        replay = () if trainer.replay is None else trainer.replay.groups
        make_data = self._worker.value.snapshot() if is_rank0() else dict
        return TrainState(version, trainer.actor.steps_done, trainer.clip.bounds, make_data, unrecorded, critic_steps, replay)

    def _write_row(self, metrics: dict[str, float], seconds: float | None = None) -> None:
        self._recorder.write_row(self._state.version, metrics, seconds)
        self._state = replace(self._state, unrecorded=None)
