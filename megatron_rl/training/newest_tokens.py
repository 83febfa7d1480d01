"""Compares tokens of the newest policy version with the engines while the trainer still holds that version.

If engines sample ahead of the trainer (`placement.max_staleness`), all tokens of a step may be older than the trainer's weights, and their
log-probs say nothing about the engine. So before the optimizer step, the trainer scores some completions of later steps whose tokens its
own version sampled. If none has ended yet, the engines answer the canary once more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.diagnosis.mismatch import TOKENS, MismatchBound, measure_mismatch
from megatron_rl.distributed import Rank0, is_rank0, run_on_rank0
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.passes.replicas import share_out
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.rollout.worker import AsyncRolloutWorker
from megatron_rl.sync.weight_sync import RecoveringWeightSync
from megatron_rl.training.samples import fetch_columns, to_training_samples

MOST = 8  # completions that are scored; they cost one small forward pass


class NewestTokens:
    """Called by the loop in every step, before its optimizer steps. All methods are collective."""

    def __init__(
        self,
        config: Config,
        actor: Actor,
        worker: Rank0[AsyncRolloutWorker],
        sync: RecoveringWeightSync,
        bound: MismatchBound,
        routing: RoutingShape | None = None,
    ) -> None:
        """`routing`: shape of the engine's routing records, or None if they are not replayed."""
        self._config, self._samples_ahead = config, bool(config.placement.max_staleness)
        self._actor, self._worker, self._sync, self._bound, self._routing = actor, worker, sync, bound, routing

    def is_needed(self, metrics: dict[str, float]) -> bool:
        """Return whether engines sample ahead and a step with these metrics has compared no token."""
        return self._samples_ahead and not metrics.get(TOKENS)

    def compare(self, version: int) -> dict[str, float]:
        """Return the mismatch of tokens that `version`, which the trainer holds, has sampled, and how many were compared. Raise RunError if
        it exceeds the bound."""
        metrics = self._sync.run_with_recovery(version, lambda: self._score(version))
        if not metrics:
            metrics = {TOKENS: float(self._sync.run_with_recovery(version, lambda: self._sync.ask_canary(version)))}
        self._bound.check(metrics)
        return metrics

    def _score(self, version: int) -> dict[str, float]:
        """Return the mismatch of completions that have ended, or {} if none has."""
        chosen = Rank0(lambda: self._choose(version))
        if not run_on_rank0(lambda: len(chosen.value), int):
            return {}
        own = share_out(chosen.value if is_rank0() else [], fetch=partial(fetch_columns, config=self._config, routing=self._routing))
        for sample, logprobs in zip(own, self._actor.compute_logprobs(own)[0], strict=True):
            sample.old_logprobs = logprobs
        return measure_mismatch(own, combine=reduce.combine)

    def _choose(self, version: int) -> list[TrainingSample]:
        """Return samples with tokens of `version` from the groups that ended last, with lags relative to it. Rank 0."""
        chosen = list[TrainingSample]()
        for trained_at, completion in self._worker.value.list_ended_ahead():
            for sample in to_training_samples(RolloutBatch([completion]), self._routing):
                if sample.remote is not None:
                    sample.remote = replace(sample.remote, trained_at=version)
                    is_new = version in sample.remote.versions
                else:
                    sample.version_lags = (sample.version_lags.int() - (trained_at - version)).to(torch.uint8)
                    is_new = bool((sample.version_lags == 0).any())
                if is_new:
                    chosen.append(sample)
            if len(chosen) >= MOST:
                break
        for number, sample in enumerate(chosen):
            sample.number = number
        return chosen
