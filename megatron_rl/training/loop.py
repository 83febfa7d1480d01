"""The loop, on one page.

    prompts -> engine generates groups -> rewards -> actor and reference log-probs -> advantages, corrections -> policy loss
            -> optimizer steps -> blocks quantised once -> sync + proof -> next policy version

Every rank runs it; what only rank 0 can do (engines, rewards, log) happens inside `sync.run_with_recovery` and after `is_rank0`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import torch

from megatron_rl.algorithm.advantages import assign_advantages
from megatron_rl.algorithm.clip_calibration import ClipCalibration
from megatron_rl.algorithm.importance_weights import assign_corrections
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config, PlacementConfig
from megatron_rl.distributed import is_rank0
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
    """One training run. `worker` and `log` exist on rank 0 only; `reference` is None where algorithm.kl_coef is 0; `attribution` is needed
    where log.attribute_every is not 0. With `resume_state`, the run goes on from there: actor and worker stand there already."""

    def __init__(
        self,
        config: Config,
        actor: Actor,
        reference: Policy | None,
        sync: RecoveringWeightSync,
        worker: RolloutWorker | AsyncRolloutWorker | None,
        log: RunLog | None,
        checkpoints: CheckpointManager,
        attribution: MismatchAttribution | None = None,
        resume_state: TrainState | None = None,
        colocation: ColocationManager | None = None,
    ) -> None:
        self.config, self.actor, self.reference, self.sync = config, actor, reference, sync
        self._checkpoints = checkpoints
        self._worker = cast(RolloutWorker | AsyncRolloutWorker, worker)  # these two are used on rank 0 only
        self._log = cast(RunLog, log)
        self._attribution = cast(MismatchAttribution, attribution)
        self._colocation = colocation or ColocationManager(PlacementConfig(), actor, None)
        self._clip = ClipCalibration(config.algorithm, self._current_logprobs)
        self.version = 0
        if resume_state is not None:
            self.version, self._clip.bounds = resume_state.version, resume_state.clip_bounds
        self._next_row_metrics: dict[str, float] = {}  # what the next row says of the time since the last one
        self._state = self._snapshot_state({} if resume_state is None else resume_state.unrecorded)

    def run(self) -> None:
        """All steps that are left, after a first sync that hands the engine the starting policy under its version, 0 in a new run."""
        hang_watchdog.enter_phase("sync", self.version)
        found, started = self.sync.run(self.version).metrics(), self._state.unrecorded
        if started is not None:
            self._log_row({**started, **found, **self._evaluate(self.version)})
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
        """Writes a checkpoint of the newest policy, unless it is written already; collective. See `CheckpointManager.write`. Raises
        RunError
        within a policy's optimizer steps, from where no run could go on."""
        if self.actor.steps_done != self._state.optimizer_steps:
            self._checkpoints.wait()
            raise RunError(f"the weights are between policy versions {self._state.version} and {self._state.version + 1}")
        self._checkpoints.write(self._state, last)

    def _snapshot_state(self, unrecorded: dict[str, float] | None) -> TrainState:
        data = self._worker.state_dict() if is_rank0() else {}
        return TrainState(self.version, self.actor.steps_done, self._clip.bounds, data, unrecorded)

    def _step(self, step: int) -> dict[str, float]:
        with self._phase("generate"):
            rollout = self.sync.run_with_recovery(self.version, lambda: self._worker.collect(self.version))
        self._colocation.switch_to_trainer()
        metrics = compute_rollout_metrics(rollout) | self._next_row_metrics
        routing = self.actor.routing.shape if self.config.algorithm.routing_replay == "engine" else None
        sequences = to_training_samples(rollout, self.version, routing)
        with self._phase("logprobs", metrics):
            metrics |= self._compute_logprobs(sequences)
        attribution = self._begin_attribution(step, sequences, metrics)
        if attribution is not None and self.config.algorithm.routing_replay == "engine":
            metrics |= self._measure_without_replay(sequences)
        metrics |= self._assign_advantages(sequences)
        check_stop()
        with self._phase("train", metrics):
            metrics |= self._update_policy(sequences)
        if attribution is not None:
            metrics |= attribution.finish()
        if is_rank0():
            for completion, sequence in zip(rollout.completions_B, sequences, strict=True):
                completion.advantage = sequence.advantage
            self._log.write_samples(step, build_sample_rows(step, rollout.completions_B, self.config.log.samples))
        self._colocation.switch_to_engine()
        self.version += 1
        self._state = self._snapshot_state(metrics)
        with self._phase("sync"):
            report = self.sync.run(self.version)
        return metrics | report.metrics()

    def _compute_logprobs(self, sequences: list[TrainingSample]) -> dict[str, float]:
        """Fills in the log-probs of the actor and of the reference, and the routing to replay where it is the actor's own; returns entropy,
        mismatch and what the routers did."""
        own = self.config.algorithm.routing_replay == "trainer"
        with self.actor.routing.collect_stats(sequences, keep=own) as watch:
            old, entropy = self.actor.compute_logprobs(sequences)
        for sequence, logprobs in zip(sequences, old, strict=True):
            sequence.old_logprobs = logprobs
        for sequence, record in zip(sequences, watch.gather_records() if own else [], strict=own):
            sequence.routed_experts = record
        if self.reference is not None:
            for sequence, logprobs in zip(sequences, self.reference.compute_logprobs(sequences)[0], strict=True):
                sequence.reference_logprobs = logprobs
        ages = measure_staleness(sequences) if self.config.placement.max_staleness else {}
        return {"entropy": entropy, **measure_mismatch(sequences), **ages, **watch.gather_metrics()}

    def _measure_without_replay(self, sequences: list[TrainingSample]) -> dict[str, float]:
        """What the mismatch would be without replay, and how many tokens would go to other experts than the engine's; a forward pass."""
        with self.actor.routing.disable_replay(), self.actor.routing.collect_stats(sequences) as watch:
            old = self.actor.compute_logprobs(sequences)[0]
        free = [replace(sequence, old_logprobs=logprobs) for sequence, logprobs in zip(sequences, old, strict=True)]
        found = {f"mismatch/without_replay/{name.removeprefix('mismatch/')}": value for name, value in measure_mismatch(free).items()}
        return found | {"router/differs_without_replay": watch.gather_metrics()["router/differs"]}

    def _begin_attribution(self, step: int, sequences: list[TrainingSample], metrics: dict[str, float]) -> MismatchAttribution | None:
        """In every so many steps, what is to be finished once the weights have changed; `metrics` gets its time."""
        every = self.config.log.attribute_every
        if not every or step % every:
            return None
        with self._phase("attribute", metrics):
            self._attribution.measure(sequences)
        return self._attribution

    def _assign_advantages(self, sequences: list[TrainingSample]) -> dict[str, float]:
        """Advantages from rewards, and the weights that correct for the engine's mismatch; returns metrics of both."""
        algorithm = self.config.algorithm
        metrics = assign_advantages(sequences, algorithm, self.config.rollout.group_size)
        return metrics | assign_corrections(sequences, algorithm)

    def _update_policy(self, sequences: list[TrainingSample]) -> dict[str, float]:
        """`updates_per_step` optimizer steps, each on its share of the groups; returns means over them."""
        algorithm, found = self.config.algorithm, []
        share = len(sequences) // algorithm.updates_per_step
        parts = [sequences[start : start + share] for start in range(0, len(sequences), share)]
        calibrate = algorithm.calibrate_every and self.version % algorithm.calibrate_every == 0
        if calibrate:
            self._clip.begin(parts[-1])
        for number, part in enumerate(parts, 1):
            if calibrate and number == len(parts):
                self._clip.end(part)
            assign_loss_weights(part, algorithm.aggregate, self.config.rollout.max_new_tokens)
            found.append(self.actor.update(part, PolicyLoss(self._clip.config)))
        bounds = dict(zip(("clip/bound_low", "clip/bound_high"), self._clip.bounds, strict=True)) if algorithm.calibrate_every else {}
        return {name: sum(metrics[name] for metrics in found) / len(parts) for name in found[0] if name != "loss/total"} | bounds

    def _current_logprobs(self, sequences: list[TrainingSample], quantised: bool) -> list[torch.Tensor]:
        with nullcontext() if quantised else disable_fp8(self.actor.model):
            return self.actor.compute_logprobs(sequences)[0]

    def _evaluate(self, step: int) -> dict[str, float]:
        if step % self.config.data.eval_every and step != self.config.train.steps:
            return {}
        hang_watchdog.enter_phase("eval")
        return self.sync.run_with_recovery(self.version, lambda: self._worker.evaluate(self.version))

    @contextmanager
    def _phase(self, name: str, metrics: dict[str, float] | None = None) -> Iterator[None]:
        """Says on the progress bar what is being done; stores its seconds as `time/NAME` where `metrics` is given."""
        if is_rank0():
            self._log.set_phase(name)
        hang_watchdog.enter_phase(name)
        self._colocation.begin_phase()
        start = time.perf_counter()
        yield
        self._colocation.end_phase(name)
        if metrics is not None:
            metrics[f"time/{name}"] = time.perf_counter() - start

    def _log_row(self, metrics: dict[str, float]) -> None:
        memory = self._colocation.collect_memory_metrics()
        if is_rank0():
            self._log.write_step({"step": self.version, "policy_version": self.version, **metrics, **memory})
        self._state = replace(self._state, unrecorded=None)


def to_training_samples(rollout: RolloutBatch, version: int = 0, routing: RoutingShape | None = None) -> list[TrainingSample]:
    """The view of the completions that the trainer has at `version`; rewards and the engine's log-probs included, and its routing where
    `routing` is given.

    Raises RunError where that does not fit.
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
