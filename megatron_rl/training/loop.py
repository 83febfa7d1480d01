"""The loop, on one page.

    prompts -> engine generates groups -> rewards -> actor and reference log-probs -> advantages, corrections -> policy loss
            -> optimizer steps -> blocks quantized once -> sync + proof -> next policy version

Every rank runs it; engines, rewards and log exist on rank 0 only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from megatron_rl.algorithm.advantages import assign_advantages
from megatron_rl.algorithm.clip_calibration import ClipCalibration
from megatron_rl.algorithm.importance_weights import assign_corrections
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.mcore.actor import Actor, Policy
from megatron_rl.mcore.layers.fp8_linear import disable_fp8
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.run_log import RunLog
from megatron_rl.observability.signals import check_stop
from megatron_rl.rollout.async_worker import AsyncRolloutWorker
from megatron_rl.rollout.worker import RolloutBatch, RolloutWorker, build_sample_rows, compute_rollout_metrics
from megatron_rl.sync.recovery import RecoveringWeightSync
from megatron_rl.training.checkpoint_manager import CheckpointManager
from megatron_rl.training.colocation import ColocationManager
from megatron_rl.training.mismatch import measure_mismatch, measure_staleness
from megatron_rl.training.mismatch_attribution import MismatchAttribution
from megatron_rl.training.train_state import TrainState


class Loop:
    """One training run. `reference` is None if algorithm.kl_coef is 0. With `resume_state` the run goes on from there; actor and worker are
    in that state already."""

    def __init__(
        self,
        config: Config,
        actor: Actor,
        reference: Policy | None,
        sync: RecoveringWeightSync,
        worker: Rank0[RolloutWorker | AsyncRolloutWorker],
        log: Rank0[RunLog],
        checkpoints: CheckpointManager,
        attribution: MismatchAttribution,
        colocation: ColocationManager,
        resume_state: TrainState | None = None,
    ) -> None:
        self.config, self.actor, self.reference, self.sync = config, actor, reference, sync
        self._checkpoints = checkpoints
        self._worker, self._log, self._attribution, self._colocation = worker, log, attribution, colocation
        self._clip = ClipCalibration(config.algorithm, self._current_logprobs)
        self.version = 0
        if resume_state is not None:
            self.version, self._clip.bounds = resume_state.version, resume_state.clip_bounds
        self._next_row_metrics: dict[str, float] = {}  # measured after a step's row was written
        self._state = self._snapshot_state({} if resume_state is None else resume_state.unrecorded)

    def run(self) -> None:
        """Run all steps that are left, after a first sync that gives the engine the starting policy under its version, 0 in a new run."""
        hang_watchdog.enter_phase("sync", self.version)
        sync_metrics, unrecorded = self.sync.run(self.version).metrics(), self._state.unrecorded
        if unrecorded is not None:
            self._log_row({**unrecorded, **sync_metrics, **self._evaluate(self.version)})
        for step in range(self.version + 1, self.config.train.steps + 1):
            hang_watchdog.enter_phase("the start", step)
            check_stop()
            start = time.perf_counter()
            metrics = self._step(step)
            metrics |= self._evaluate(step)
            self._log_row({**metrics, "time/step": time.perf_counter() - start})
            with self._phase("checkpoint", self._next_row_metrics):
                self._checkpoints.poll()
                last, every = step == self.config.train.steps, self.config.checkpoint.every
                if last or (every and step % every == 0):
                    self.save(last)

    def save(self, last: bool) -> None:
        """Write a checkpoint of the newest policy, unless it is written already; see `CheckpointManager.write`. Collective.

        Raises RunError between the optimizer steps of one policy version, from where no run could go on.
        """
        if self.actor.steps_done != self._state.optimizer_steps:
            self._checkpoints.wait()
            raise RunError(f"the weights are between policy versions {self._state.version} and {self._state.version + 1}")
        self._checkpoints.write(self._state, last)

    def _snapshot_state(self, unrecorded: dict[str, float] | None) -> TrainState:
        data = self._worker.run(lambda worker: worker.state_dict())
        return TrainState(self.version, self.actor.steps_done, self._clip.bounds, data, unrecorded)

    def _step(self, step: int) -> dict[str, float]:
        """Run one step from prompts to a proved sync; return its metrics."""
        algorithm, attribute_every = self.config.algorithm, self.config.log.attribute_every
        with self._phase("generate"):
            rollout = self.sync.run_with_recovery(self.version, lambda: self._worker.value.collect(self.version))
        self._colocation.switch_to_trainer()
        metrics = compute_rollout_metrics(rollout) | self._next_row_metrics
        engine_routing = self.actor.routing.shape if algorithm.routing_replay == "engine" else None
        samples = to_training_samples(rollout, self.version, engine_routing)
        with self._phase("logprobs", metrics):
            metrics |= self._compute_logprobs(samples)
        attribute = attribute_every and step % attribute_every == 0
        if attribute:
            with self._phase("attribute", metrics):
                self._attribution.measure(samples)
            if engine_routing is not None:
                metrics |= self._measure_without_replay(samples)
        metrics |= assign_advantages(samples, algorithm, self.config.rollout.group_size)
        metrics |= assign_corrections(samples, algorithm)
        check_stop()
        with self._phase("train", metrics):
            metrics |= self._update_policy(samples)
        if attribute:
            metrics |= self._attribution.finish()
        for completion, sample in zip(rollout.completions_B, samples, strict=True):
            completion.advantage = sample.advantage
        sample_rows = build_sample_rows(step, rollout.completions_B, self.config.log.samples)
        self._log.tell(lambda log: log.write_samples(step, sample_rows))
        self._colocation.switch_to_engine()
        self.version += 1
        self._state = self._snapshot_state(metrics)
        with self._phase("sync"):
            report = self.sync.run(self.version)
        return metrics | report.metrics()

    def _compute_logprobs(self, samples: list[TrainingSample]) -> dict[str, float]:
        """Set the log-probs of the actor and of the reference, and the routing to replay if it is the actor's own; return entropy, mismatch
        and metrics of the routers."""
        replay_own = self.config.algorithm.routing_replay == "trainer"
        with self.actor.routing.collect_stats(samples, keep=replay_own) as routing:
            logprobs_B, entropy = self.actor.compute_logprobs(samples)
        for sample, logprobs in zip(samples, logprobs_B, strict=True):
            sample.old_logprobs = logprobs
        for sample, record in zip(samples, routing.gather_records() if replay_own else [], strict=replay_own):
            sample.routed_experts = record
        if self.reference is not None:
            for sample, logprobs in zip(samples, self.reference.compute_logprobs(samples)[0], strict=True):
                sample.reference_logprobs = logprobs
        staleness = measure_staleness(samples) if self.config.placement.max_staleness else {}
        return {"entropy": entropy, **measure_mismatch(samples), **staleness, **routing.gather_metrics()}

    def _measure_without_replay(self, samples: list[TrainingSample]) -> dict[str, float]:
        """Return the mismatch without routing replay, and how many tokens would go to other experts than the engine's; one forward pass."""
        with self.actor.routing.disable_replay(), self.actor.routing.collect_stats(samples) as routing:
            logprobs_B = self.actor.compute_logprobs(samples)[0]
        without = [replace(sample, old_logprobs=logprobs) for sample, logprobs in zip(samples, logprobs_B, strict=True)]
        metrics = {f"mismatch/without_replay/{name.removeprefix('mismatch/')}": value for name, value in measure_mismatch(without).items()}
        return metrics | {"router/differs_without_replay": routing.gather_metrics()["router/differs"]}

    def _update_policy(self, samples: list[TrainingSample]) -> dict[str, float]:
        """Take `updates_per_step` optimizer steps, each on its mini-batch of whole groups; return means over them."""
        algorithm, updates = self.config.algorithm, []
        size = len(samples) // algorithm.updates_per_step
        mini_batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        calibrate = algorithm.calibrate_every and self.version % algorithm.calibrate_every == 0
        if calibrate:
            self._clip.begin(mini_batches[-1])
        for number, mini_batch in enumerate(mini_batches, 1):
            if calibrate and number == len(mini_batches):
                self._clip.end(mini_batch)
            assign_loss_weights(mini_batch, algorithm.aggregate, self.config.rollout.max_new_tokens)
            updates.append(self.actor.update(mini_batch, PolicyLoss(self._clip.config)))
        bounds = dict(zip(("clip/bound_low", "clip/bound_high"), self._clip.bounds, strict=True)) if algorithm.calibrate_every else {}
        return {name: sum(update[name] for update in updates) / len(updates) for name in updates[0] if name != "loss/total"} | bounds

    def _current_logprobs(self, samples: list[TrainingSample], quantized: bool) -> list[torch.Tensor]:
        with nullcontext() if quantized else disable_fp8(self.actor.model):
            return self.actor.compute_logprobs(samples)[0]

    def _evaluate(self, step: int) -> dict[str, float]:
        if step % self.config.data.eval_every and step != self.config.train.steps:
            return {}
        hang_watchdog.enter_phase("eval")
        return self.sync.run_with_recovery(self.version, lambda: self._worker.value.evaluate(self.version))

    @contextmanager
    def _phase(self, name: str, metrics: dict[str, float] | None = None) -> Iterator[None]:
        """Show a phase on the progress bar and to the watchdog, and measure its memory; set `metrics["time/NAME"]` to its seconds."""
        self._log.tell(lambda log: log.set_phase(name))
        hang_watchdog.enter_phase(name)
        self._colocation.begin_phase()
        start = time.perf_counter()
        yield
        self._colocation.end_phase(name)
        if metrics is not None:
            metrics[f"time/{name}"] = time.perf_counter() - start

    def _log_row(self, metrics: dict[str, float]) -> None:
        row = {"step": self.version, "policy_version": self.version, **metrics, **self._colocation.collect_memory_metrics()}
        self._log.tell(lambda log: log.write_step(row))
        self._state = replace(self._state, unrecorded=None)


def to_training_samples(rollout: RolloutBatch, version: int = 0, routing: RoutingShape | None = None) -> list[TrainingSample]:
    """Convert completions for a trainer at `version`, with their rewards, the engine's log-probs and, if `routing` is given, its routing.

    Raises RunError if that routing does not fit the model.
    """
    if routing is not None:
        for number, completion in enumerate(rollout.completions_B, 1):
            tokens = len(completion.prompt_ids_T) + len(completion.output_ids_T)
            routing.check(completion.routed_experts_T, tokens, f"completion {number} of {len(rollout.completions_B)}")
    return [
        TrainingSample(
            completion.prompt_ids_T,
            completion.output_ids_T,
            reward=completion.score,
            excluded=completion.reward.excluded,
            rollout_logprobs=_sampled(torch.tensor(completion.logprobs_T), completion.response_mask_T),
            response_mask=completion.response_mask_T,
            routed_experts=torch.empty(0) if routing is None else torch.from_numpy(completion.routed_experts_T),
            version_lags=_sampled(version - torch.tensor(completion.versions_T), completion.response_mask_T)
            if completion.versions_T
            else torch.empty(0),
        )
        for completion in rollout.completions_B
    ]


def _sampled(values_T: torch.Tensor, response_mask_T: list[bool]) -> torch.Tensor:
    return values_T[torch.tensor(response_mask_T)] if response_mask_T else values_T
