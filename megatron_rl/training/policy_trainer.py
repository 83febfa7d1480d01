"""The trainer's part of a step: log-probs under actor and reference, the mismatch and its causes, and the policy update.

If trainer and engine share devices (`placement.kind = "colocated"`), they take turns with the memory: the engine releases its KV cache, and
on a GPU its weights, after generation and allocates them again at the sync. Before the sync, the trainer offloads the optimizer's state to
host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING

import torch

from megatron_rl.algorithm.advantages import compute_advantages, measure_kl
from megatron_rl.algorithm.clip_calibration import ClipCalibration
from megatron_rl.algorithm.gae import KL
from megatron_rl.algorithm.old_logprobs import OldLogprobs
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.draws import mark_draws, unmark_draws
from megatron_rl.batch.totals import Totals
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.diagnosis.attribution import MismatchAttribution
from megatron_rl.diagnosis.draws import DrawCheck
from megatron_rl.diagnosis.mismatch import TOKENS, WITHOUT_REPLAY, MismatchBound, measure_mismatch, measure_staleness
from megatron_rl.distributed import Rank0, run_on_rank0
from megatron_rl.errors import DrawError, MismatchError, RunError
from megatron_rl.mcore.actor import TOTAL_LOSS, Actor, Policy
from megatron_rl.mcore.layers.linear.quantized_linear import disable_quantization
from megatron_rl.mcore.layers.moe.router import DIFFERS
from megatron_rl.mcore.layers.moe.token_counts import keeps_routing
from megatron_rl.mcore.optim.master_check import check_masters
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.passes.draws import DrawRecord
from megatron_rl.mcore.weights.cache_scales import renew_scales
from megatron_rl.metrics import declare
from megatron_rl.plugs import LOSSES
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.rollout.metrics import EQUAL
from megatron_rl.training.critic_trainer import CriticTrainer
from megatron_rl.training.samples import StepSamples, share_samples

if TYPE_CHECKING:  # loaded only by runs that replay groups
    from megatron_rl.batch.replay import ReplayBuffer

_ENTROPY = declare("entropy", "mean entropy of the policy per token", "nats", "entropy (nats per token)")
_DIFFERS_WITHOUT_REPLAY = declare(
    "router/differs_without_replay",
    "the same, if no earlier layer had replayed the routing",
    "share",
    "tokens sent elsewhere",
    label="without",
)
_BOUNDS = (
    declare("clip/bound_low", "calibrated lower bound of the ratio", "number", "calibrated bounds", label="lower"),
    declare("clip/bound_high", "calibrated upper bound of the ratio", "number", "calibrated bounds", label="upper"),
)
_TOO_SMALL = "a learning rate too small for the weights' precision, advantages that are all 0, or see precision/response"
_TOO_LARGE = "a learning rate too large, too many updates per step, or see precision/response"
_UPDATE_PANEL = "|Δ log p| of the step's own update (nats)"
_UPDATE_SIZE = (
    declare(
        "update/abs_mean",
        "mean |log p after the step's updates - log p before| over a sample of its tokens",
        "nats",
        _UPDATE_PANEL,
        label="mean over tokens",
        expected=(1e-6, 0.2),
        causes=(_TOO_SMALL, _TOO_LARGE),
    ),
    declare(
        "update/abs_max",
        "largest |log p after the step's updates - log p before| of a token of that sample",
        "nats",
        _UPDATE_PANEL,
        label="largest",
    ),
)
"""How far a step moved the log-probs. Below 1e-6, a log-prob in FP32 is within its rounding error, so nothing was learned. Above 0.2, the
average token has left the range of ratios that PPO's clip of 0.2 trusts after a single step."""


class PolicyTrainer:
    """Trains `actor`. `reference` is None if `algorithm.kl_coef` is 0, and `teacher` is None without a [teacher] section. All methods are
    collective: every rank passes its replica's samples."""

    def __init__(
        self,
        config: Config,
        actor: Actor,
        reference: Policy | None,
        attribution: MismatchAttribution,
        engines: Rank0[Engine],
        mismatch_bound: MismatchBound | None = None,
        draw_check: DrawCheck | None = None,
        old_logprobs: OldLogprobs | None = None,
        critic: CriticTrainer | None = None,
        teacher: Policy | None = None,
    ) -> None:
        self._mismatch_bound, self._draw_check = mismatch_bound, draw_check
        self.actor, self.attribution, self.critic = actor, attribution, critic
        self.clip = ClipCalibration(config.algorithm, self._current_logprobs, lambda sums: reduce.sum_over_replicas(*sums))
        self.engine_routing = actor.routing.shape if config.algorithm.routing_replay == "engine" else None
        """Shape of the engine's routing records, or None if they are not replayed."""
        self._records: dict[int, torch.Tensor] = {}  # the actor's routing of the step's samples by number, if only the update replays it
        self._config, self._reference, self._teacher, self._engines = config, reference, teacher, engines
        self.compared: list[TrainingSample] = []  # this replica's samples of the newest step, with the trainer's log-probs
        self._old_logprobs = old_logprobs or OldLogprobs(config, exact=False)
        self._equal = 0.0  # `rollout.metrics.EQUAL` of the step
        self.compares_in_update = False  # whether the current step leaves out the pass of the old log-probs
        self.replay: ReplayBuffer | None = None
        if config.replay is not None:
            from megatron_rl.batch.replay import ReplayBuffer

            self.replay = ReplayBuffer(config.replay)

    def take_devices(self) -> None:
        """Release the engine's memory until the next sync, and reload the optimizer unless the critic trains first."""
        if self._config.placement.kind == "colocated":
            self._engines.run(lambda engines: engines.release_memory())
            if self.critic is None:
                self.actor.reload_optimizer()

    def leave_devices(self) -> None:
        if self._config.placement.kind == "colocated":
            self.actor.offload_optimizer()

    def share_samples(self, rollout: Rank0[RolloutBatch], step: int) -> StepSamples:
        return share_samples(rollout, step, self._config, self.engine_routing, self.actor.attention_length, self.replay)

    def compute_logprobs(self, step_samples: StepSamples, version: int = 0) -> dict[str, float]:
        """Set the log-probs of actor, reference, and teacher, and the actor's own routing if it is to be replayed. Return entropy,
        mismatch, draws, staleness, and the routers' metrics. Raise RunError for a mismatch or draws that the configuration forbids.

        If the engine's log-probs are the old ones (`OldLogprobs`), the first update checks them and returns these metrics."""
        samples = step_samples.own
        self.compares_in_update = self._old_logprobs.are_engines(samples, version, reduce.max_over_replicas)
        self._equal = step_samples.metrics.get(EQUAL, 0.0)
        if self.compares_in_update:
            for sample in samples:
                sample.old_logprobs = sample.rollout_logprobs
            metrics = dict[str, float]()
        else:
            metrics = self._score_actor(samples, version)
        if self._reference is not None:
            for sample, logprobs in zip(samples, self._reference.compute_logprobs(samples)[0], strict=True):
                sample.reference_logprobs = logprobs
        if self._teacher is not None:
            with self._teacher.routing.disable_replay():  # the records name the policy's experts
                for sample, logprobs in zip(samples, self._teacher.compute_logprobs(samples)[0], strict=True):
                    sample.teacher_logprobs = logprobs
        stale = self._config.placement.max_staleness or self._config.replay is not None
        return metrics | (measure_staleness(samples, reduce.combine) if stale else {})

    def _score_actor(self, samples: list[TrainingSample], version: int) -> dict[str, float]:
        """Run the pass of the old log-probs and return its metrics."""
        keep = self.actor.routing.shape is not None and keeps_routing(self._config.algorithm)
        with self.actor.routing.collect_stats(samples, keep) as routing, self._record_draws(samples, version) as draws:
            logprobs_B, entropy = self.actor.compute_logprobs(samples)
        for sample, logprobs in zip(samples, logprobs_B, strict=True):
            sample.old_logprobs = logprobs
        records = {sample.number: record for sample, record in zip(samples, routing.gather_records() if keep else [], strict=keep)}
        if self._config.algorithm.routing_replay == "trainer":
            for sample in samples:
                sample.routed_experts = records[sample.number]
        else:
            self._records = records
        return {_ENTROPY: entropy, **self._compare(samples, draws), **routing.gather_metrics()}

    @contextmanager
    def _record_draws(self, samples: list[TrainingSample], version: int) -> Iterator[DrawRecord]:
        """Context manager in which passes record the draws that are to be checked."""
        if self._draw_check is not None:
            mark_draws(samples, version, self._draw_check.share)
        with self.actor.record_draws() as draws:
            yield draws
        unmark_draws(samples)

    def _compare(self, samples: list[TrainingSample], draws: DrawRecord) -> dict[str, float]:
        """Return the mismatch and the draws of samples with the trainer's log-probs. Raise RunError if the configuration forbids them."""
        self.compared = samples
        mismatch = measure_mismatch(samples, by_position=True, combine=reduce.combine)
        if self._mismatch_bound is not None and not self.compares_nothing(mismatch):
            self._mismatch_bound.check(mismatch)
        if self._draw_check is None:
            return mismatch
        return mismatch | self._draw_check.check(draws, samples, self._equal)

    def compares_nothing(self, metrics: Mapping[str, float]) -> bool:
        """Return whether engines sample ahead of the trainer and a step with these metrics has compared no token of its own version. The
        engines then answer the canary again, before the optimizer step."""
        return bool(self._config.placement.max_staleness) and not metrics.get(TOKENS) and not self.compares_in_update

    def count_compared(self, tokens: int) -> dict[str, float]:
        """Return the number of the canary's compared tokens as a metric. Raise RunError if too many steps have compared none."""
        metrics = {TOKENS: float(tokens)}
        if self._mismatch_bound is not None:
            self._mismatch_bound.check(metrics)
        return metrics

    def assign_late_advantages(self, samples: StepSamples) -> dict[str, float]:
        """Set the advantages if the KL term is part of the reward, which needs log-probs, and return its metric; else return {}. A critic
        sets its advantages itself."""
        algorithm = self._config.algorithm
        if not algorithm.kl_in_reward or algorithm.has_critic:
            return {}
        of_all = reduce.merge_replicas({sample.number: measure_kl(sample, algorithm) for sample in samples.own}, float)
        kl = [of_all[number] for number in range(samples.count)]

        def compute() -> list[float]:
            rewards = [reward - algorithm.kl_coef * value for reward, value in zip(samples.rewards, kl, strict=True)]
            return compute_advantages(rewards, samples.excluded, algorithm, self._config.rollout.group_size, samples.lengths)

        advantages = run_on_rank0(compute, list[float])
        for sample in samples.own:
            sample.advantage = advantages[sample.number]
        return {KL: sum(kl) / max(samples.sampled_tokens, 1)}

    def measure_without_replay(self, step_samples: StepSamples) -> dict[str, float]:
        """Return the mismatch without routing replay, and the share of tokens that then go to other experts; {} if nothing is replayed.
        Costs one forward pass."""
        if self.engine_routing is None:
            return {}
        samples = step_samples.own
        with self.actor.routing.disable_replay(), self.actor.routing.collect_stats(samples) as routing:
            logprobs_B = self.actor.compute_logprobs(samples)[0]
        without = [replace(sample, old_logprobs=logprobs) for sample, logprobs in zip(samples, logprobs_B, strict=True)]
        mismatch = measure_mismatch(without, WITHOUT_REPLAY, combine=reduce.combine)
        return mismatch | {_DIFFERS_WITHOUT_REPLAY: routing.gather_metrics()[DIFFERS]}

    def update(self, samples: StepSamples, version: int) -> dict[str, float]:
        """Run the optimizer steps from `version` to the next, one per mini-batch. Return means over these steps, and how far all of them
        moved the log-probs. While only the critic learns (`critic.critic_warmup`), do nothing and return {}."""
        algorithm, updates = self._config.algorithm, []
        if self.critic is not None and version < self._config.critic.critic_warmup:
            return {}
        self.actor.reload_optimizer()
        mini_batches = samples.mini_batches
        calibrate = algorithm.calibrate_every and version % algorithm.calibrate_every == 0
        if calibrate:
            self.clip.begin(mini_batches[-1])
        with renew_scales(self.actor.model):
            for number, mini_batch in enumerate(mini_batches, 1):
                if calibrate and number == len(mini_batches):
                    self.clip.end(mini_batch)
                first = number == 1 and self.compares_in_update
                updates.append(self._compare_and_update(mini_batch, version) if first else self._update(mini_batch))
        bounds = dict(zip(_BOUNDS, self.clip.bounds, strict=True)) if algorithm.calibrate_every else {}
        names = dict.fromkeys(name for update in updates for name in update if name != TOTAL_LOSS)
        means = {name: mean(update[name] for update in updates if name in update) for name in names}
        changed = self._measure_change(samples)
        check_masters(self.actor.model, self.actor.optimizer, version)
        return means | bounds | changed

    def _compare_and_update(self, mini_batch: list[TrainingSample], version: int) -> dict[str, float]:
        """Take an optimizer step that compares its log-probs with the engine's, and checks its draws, before it changes a weight."""
        metrics: dict[str, float] = {}

        def compare(logprobs_B: list[torch.Tensor], entropy: float) -> None:
            scored = [replace(sample, old_logprobs=logprobs) for sample, logprobs in zip(mini_batch, logprobs_B, strict=True)]
            metrics.update({_ENTROPY: entropy, **self._compare(scored, draws)})

        with self.actor.routing.collect_stats(mini_batch) as routing, self._record_draws(mini_batch, version) as draws:
            update = self._update(mini_batch, compare)
        return {**update, **metrics, **routing.gather_metrics()}

    def _update(
        self, mini_batch: list[TrainingSample], check: Callable[[list[torch.Tensor], float], None] | None = None
    ) -> dict[str, float]:
        """Take one optimizer step. An error about numbers that are not finite names the loss if it is the user's own."""
        if self._records:
            mini_batch = [replace(sample, routed_experts=self._records.pop(sample.number)) for sample in mini_batch]
        try:
            return self.actor.update(mini_batch, PolicyLoss(self.clip.config, self._config.teacher), check)
        except (MismatchError, DrawError):
            raise
        except RunError as error:
            if not LOSSES.is_own(name := self._config.algorithm.loss):
                raise
            raise RunError(f"{error}; the loss is {LOSSES.field} = {name!r}", error.log_tail) from None

    def _measure_change(self, samples: StepSamples) -> dict[str, float]:
        """Return how far the step moved the log-probs of its tokens. Measured on every n-th sample: about an eighth of them, and at most
        one micro-batch per replica. This costs about a thirtieth of the step's forward and backward passes."""
        layout, totals = self._config.train.layout, Totals()
        every = max(8, samples.tokens // (layout.dp * layout.cp * self.actor.micro_batch_tokens))
        chosen = [sample for sample in samples.own if sample.number % every == 0]
        for logprobs, sample in zip(self.actor.compute_logprobs(chosen)[0], chosen, strict=True):
            moved = (logprobs - sample.old_logprobs).abs()
            if self._config.algorithm.old_policy == "engine" and len(sample.version_lags):  # a stale token has its own version's log-prob
                moved = moved[sample.version_lags == 0]
            totals.add("change", moved)
        totals = reduce.combine(totals)
        change = totals.mean("change"), totals.largest("change")
        return dict(zip(_UPDATE_SIZE, change, strict=True)) if totals.count("change") else {}

    def _current_logprobs(self, samples: list[TrainingSample], quantized: bool) -> list[torch.Tensor]:
        with nullcontext() if quantized else disable_quantization(self.actor.model):
            return self.actor.compute_logprobs(samples)[0]
