"""The loop, on one page.

    prompts -> engine generates groups -> rewards -> actor and reference log-probs -> advantages, corrections -> policy loss
            -> optimizer steps -> blocks quantised once -> sync + proof -> next policy version

Every rank runs it; what only rank 0 can do (engines, rewards, log) happens inside `sync.serving` and after `is_rank0`.
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
from megatron_rl.algorithm.loss_weights import weigh
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import Sequence
from megatron_rl.config import Config, Placement
from megatron_rl.distributed import is_rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.mcore.actor import Actor, Policy
from megatron_rl.mcore.layers.fp8_linear import without_fp8
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.run_log import RunLog
from megatron_rl.observability.signals import check_stop
from megatron_rl.rollout.async_worker import Ahead
from megatron_rl.rollout.worker import Rollout, RolloutWorker, rollout_metrics, sample_rows
from megatron_rl.sync.recovery import SteadySync
from megatron_rl.training.checkpoint_manager import Checkpoints
from megatron_rl.training.colocation import DeviceTurns
from megatron_rl.training.mismatch import mismatch, staleness
from megatron_rl.training.mismatch_attribution import MismatchCauses
from megatron_rl.training.train_state import Mark


class Loop:
    """One training run. `worker` and `log` exist on rank 0 only; `reference` is None where algorithm.kl_coef is 0; `causes` is needed
    where log.attribute_every is not 0. With `start`, the run goes on from there: actor and worker stand there already."""

    def __init__(
        self,
        config: Config,
        actor: Actor,
        reference: Policy | None,
        sync: SteadySync,
        worker: RolloutWorker | Ahead | None,
        log: RunLog | None,
        checkpoints: Checkpoints,
        causes: MismatchCauses | None = None,
        start: Mark | None = None,
        turns: DeviceTurns | None = None,
    ) -> None:
        self.config, self.actor, self.reference, self.sync = config, actor, reference, sync
        self._checkpoints = checkpoints
        self._worker = cast(RolloutWorker | Ahead, worker)  # these two are used on rank 0 only
        self._log = cast(RunLog, log)
        self._causes = cast(MismatchCauses, causes)
        self._turns = turns or DeviceTurns(Placement(), actor, None)
        self._clip = ClipCalibration(config.algorithm, self._logprobs_of_now)
        self.version = 0
        if start is not None:
            self.version, self._clip.bounds = start.version, start.clip_bounds
        self._after_row: dict[str, float] = {}  # what the next row says of the time since the last one
        self._mark = self._mark_now({} if start is None else start.unrecorded)

    def run(self) -> None:
        """All steps that are left, after a first sync that hands the engine the starting policy under its version, 0 in a new run."""
        hang_watchdog.enter("sync", self.version)
        found, started = self.sync.run(self.version).metrics(), self._mark.unrecorded
        if started is not None:
            self._record({**started, **found, **self._evaluate(self.version)})
        for step in range(self.version + 1, self.config.train.steps + 1):
            hang_watchdog.enter("the start", step)
            check_stop()
            start = time.perf_counter()
            metrics = self._step(step)
            metrics |= self._evaluate(step)
            self._record({**metrics, "time/step": time.perf_counter() - start})
            with self._phase("checkpoint", self._after_row):
                self._checkpoints.look()
                last, every = step == self.config.train.steps, self.config.checkpoint.every
                if last or (every and step % every == 0):
                    self.save(last)

    def save(self, last: bool) -> None:
        """Writes a checkpoint of the newest policy, unless it is written already; collective. See `Checkpoints.write`. Raises RunError
        within a policy's optimizer steps, from where no run could go on."""
        if self.actor.steps_done != self._mark.optimizer_steps:
            self._checkpoints.settle()
            raise RunError(f"the weights are between policy versions {self._mark.version} and {self._mark.version + 1}")
        self._checkpoints.write(self._mark, last)

    def _mark_now(self, unrecorded: dict[str, float] | None) -> Mark:
        data = self._worker.state_dict() if is_rank0() else {}
        return Mark(self.version, self.actor.steps_done, self._clip.bounds, data, unrecorded)

    def _step(self, step: int) -> dict[str, float]:
        with self._phase("generate"):
            rollout = self.sync.serving(self.version, lambda: self._worker.collect(self.version))
        self._turns.trainers()
        metrics = rollout_metrics(rollout) | self._after_row
        routing = self.actor.routing.shape if self.config.algorithm.routing_replay == "engine" else None
        sequences = to_sequences(rollout, self.version, routing)
        with self._phase("logprobs", metrics):
            metrics |= self._score(sequences)
        causes = self._begin_attribution(step, sequences, metrics)
        if causes is not None and self.config.algorithm.routing_replay == "engine":
            metrics |= self._score_freely(sequences)
        metrics |= self._credit(sequences)
        check_stop()
        with self._phase("train", metrics):
            metrics |= self._learn(sequences)
        if causes is not None:
            metrics |= causes.finish()
        if is_rank0():
            for completion, sequence in zip(rollout.completions_B, sequences, strict=True):
                completion.advantage = sequence.advantage
            self._log.samples(step, sample_rows(step, rollout.completions_B, self.config.log.samples))
        self._turns.engines()
        self.version += 1
        self._mark = self._mark_now(metrics)
        with self._phase("sync"):
            report = self.sync.run(self.version)
        return metrics | report.metrics()

    def _score(self, sequences: list[Sequence]) -> dict[str, float]:
        """Fills in the log-probs of the actor and of the reference, and the routing to replay where it is the actor's own; returns entropy,
        mismatch and what the routers did."""
        own = self.config.algorithm.routing_replay == "trainer"
        with self.actor.routing.watched(sequences, keep=own) as watch:
            old, entropy = self.actor.logprobs(sequences)
        for sequence, logprobs in zip(sequences, old, strict=True):
            sequence.old_logprobs = logprobs
        for sequence, record in zip(sequences, watch.records() if own else [], strict=own):
            sequence.experts = record
        if self.reference is not None:
            for sequence, logprobs in zip(sequences, self.reference.logprobs(sequences)[0], strict=True):
                sequence.reference_logprobs = logprobs
        ages = staleness(sequences) if self.config.placement.max_staleness else {}
        return {"entropy": entropy, **mismatch(sequences), **ages, **watch.metrics()}

    def _score_freely(self, sequences: list[Sequence]) -> dict[str, float]:
        """What the mismatch would be without replay, and how many tokens would go to other experts than the engine's; a forward pass."""
        with self.actor.routing.free(), self.actor.routing.watched(sequences) as watch:
            old = self.actor.logprobs(sequences)[0]
        free = [replace(sequence, old_logprobs=logprobs) for sequence, logprobs in zip(sequences, old, strict=True)]
        found = {f"mismatch/without_replay/{name.removeprefix('mismatch/')}": value for name, value in mismatch(free).items()}
        return found | {"router/differs_without_replay": watch.metrics()["router/differs"]}

    def _begin_attribution(self, step: int, sequences: list[Sequence], metrics: dict[str, float]) -> MismatchCauses | None:
        """In every so many steps, what is to be finished once the weights have changed; `metrics` gets its time."""
        every = self.config.log.attribute_every
        if not every or step % every:
            return None
        with self._phase("attribute", metrics):
            self._causes.measure(sequences)
        return self._causes

    def _credit(self, sequences: list[Sequence]) -> dict[str, float]:
        """Advantages from rewards, and the weights that correct for the engine's mismatch; returns metrics of both."""
        algorithm = self.config.algorithm
        metrics = assign_advantages(sequences, algorithm, self.config.rollout.group_size)
        return metrics | assign_corrections(sequences, algorithm)

    def _learn(self, sequences: list[Sequence]) -> dict[str, float]:
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
            weigh(part, algorithm.aggregate, self.config.rollout.max_new_tokens)
            found.append(self.actor.update(part, PolicyLoss(self._clip.config)))
        bounds = dict(zip(("clip/bound_low", "clip/bound_high"), self._clip.bounds, strict=True)) if algorithm.calibrate_every else {}
        return {name: sum(metrics[name] for metrics in found) / len(parts) for name in found[0] if name != "loss/total"} | bounds

    def _logprobs_of_now(self, sequences: list[Sequence], quantised: bool) -> list[torch.Tensor]:
        with nullcontext() if quantised else without_fp8(self.actor.model):
            return self.actor.logprobs(sequences)[0]

    def _evaluate(self, step: int) -> dict[str, float]:
        if step % self.config.data.eval_every and step != self.config.train.steps:
            return {}
        hang_watchdog.enter("eval")
        return self.sync.serving(self.version, lambda: self._worker.evaluate(self.version))

    @contextmanager
    def _phase(self, name: str, metrics: dict[str, float] | None = None) -> Iterator[None]:
        """Says on the progress bar what is being done; stores its seconds as `time/NAME` where `metrics` is given."""
        if is_rank0():
            self._log.now(name)
        hang_watchdog.enter(name)
        self._turns.begin()
        start = time.perf_counter()
        yield
        self._turns.end(name)
        if metrics is not None:
            metrics[f"time/{name}"] = time.perf_counter() - start

    def _record(self, metrics: dict[str, float]) -> None:
        memory = self._turns.memory()
        if is_rank0():
            self._log.step({"step": self.version, "policy_version": self.version, **metrics, **memory})
        self._mark = replace(self._mark, unrecorded=None)


def to_sequences(rollout: Rollout, version: int = 0, routing: RoutingShape | None = None) -> list[Sequence]:
    """The view of the completions that the trainer has at `version`; rewards and the engine's log-probs included, and its routing where
    `routing` is given.

    Raises RunError where that does not fit.
    """
    if routing is not None:
        for number, completion in enumerate(rollout.completions_B, 1):
            tokens = len(completion.prompt_ids_T) + len(completion.output_ids_T)
            routing.check(completion.experts_T, tokens, f"completion {number} of {len(rollout.completions_B)}")
    return [
        Sequence(
            completion.prompt_ids_T,
            completion.output_ids_T,
            reward=completion.score,
            excluded=completion.reward.excluded,
            rollout_logprobs=_sampled(torch.tensor(completion.logprobs_T), completion.sampled_T),
            sampled=completion.sampled_T,
            experts=torch.empty(0) if routing is None else torch.from_numpy(completion.experts_T),
            ages=_sampled(version - torch.tensor(completion.versions_T), completion.sampled_T) if completion.versions_T else torch.empty(0),
        )
        for completion in rollout.completions_B
    ]


def _sampled(values_T: torch.Tensor, sampled_T: list[bool]) -> torch.Tensor:
    return values_T[torch.tensor(sampled_T)] if sampled_T else values_T
