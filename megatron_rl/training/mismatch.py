"""Metrics of how the engine's log-probs differ from the trainer's: by precision for tokens of its own version, by staleness for older ones.

The difference d = trainer - engine of a stale token holds the optimizer steps since it was sampled. It says nothing about precision, so
it never counts in `mismatch/`, which shows that trainer and engine are the same policy.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithm.kl import k3
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.metrics import declare

_DIFFERENCE, _PANEL, _UNREPLAYED = "|log p trainer - log p engine|", "|Δ log p| (nats)", "had the trainer not replayed the routing"
_MEAN = f"mean {_DIFFERENCE} over the tokens of the trainer's version"
MISMATCH = (
    declare("mismatch/abs_mean", _MEAN, "nats", _PANEL, label="mean over tokens", progress="[cyan]mismatch mean {:.1e}"),
    declare("mismatch/abs_max", f"largest {_DIFFERENCE} of a token", "nats", _PANEL, label="largest", progress="[cyan]max {:.1e}"),
    declare(
        "mismatch/k3_kl", "k3 estimate of KL(rollout || trainer) per token", "nats", "KL (nats per token)", label="KL(rollout ‖ trainer)"
    ),
)
WITHOUT_REPLAY = (
    declare("mismatch/without_replay/abs_mean", f"mean {_DIFFERENCE}, {_UNREPLAYED}", "nats", _PANEL, label="mean without routing replay"),
    declare("mismatch/without_replay/abs_max", f"largest {_DIFFERENCE}, {_UNREPLAYED}", "nats"),
    declare("mismatch/without_replay/k3_kl", f"k3 estimate of KL(rollout || trainer), {_UNREPLAYED}", "nats"),
)
SAMPLE_BIN = 32
"""Tokens of an answer that a row of samples.jsonl takes together."""
_BOUNDS = torch.tensor([32 << power for power in range(26)])
"""Answers are cut into bins at these positions, for the metrics."""
_POSITION = "positions of the answer from {} to twice that; before 32 for 0"
BY_POSITION = (
    declare("mismatch/position/{}/abs_mean", f"mean {_DIFFERENCE}, {_POSITION}", "nats", "|Δ log p| by position (nats)", label="from {}"),
    declare("mismatch/position/{}/tokens", f"sampled tokens, {_POSITION}", "count"),
)
_AGE = "age (policy versions)"
AGES = (
    declare("staleness/mean", "mean age of a sampled token, in policy versions", "number", _AGE),
    declare("staleness/max", "age of the oldest sampled token, in policy versions", "count", _AGE, label="oldest"),
    declare("staleness/share", "share of the tokens that an older version sampled", "share"),
    declare("staleness/mixed", "share of completions that several versions sampled", "share"),
)
STALE_MISMATCH = (
    declare("staleness/abs_mean", f"mean {_DIFFERENCE} over the stale tokens", "nats"),
    declare("staleness/k3_kl", "k3 estimate of KL(rollout || trainer) per stale token", "nats"),
)


def measure_mismatch(samples: list[TrainingSample], names: tuple[str, ...] = MISMATCH, by_position: bool = False) -> dict[str, float]:
    """Return |d| and the k3 estimate of KL(engine || trainer) over the tokens of the trainer's own version, and with `by_position` the
    mean |d| along the answers; {} if there are none."""
    difference, lags = _flatten(samples)
    current = difference[lags == 0]
    if not len(current):
        return {}
    metrics = dict(zip(names, (float(current.abs().mean()), float(current.abs().max()), float(k3(current).mean())), strict=True))
    if by_position:
        metrics |= _measure_by_position(current, torch.cat([_positions(sample) for sample in samples])[lags == 0])
    return metrics


def _measure_by_position(difference: torch.Tensor, positions: torch.Tensor) -> dict[str, float]:
    """Return the mean |d| of tokens at these positions of their answers, and their number, for every bin that has any. Bins double in
    length, so there are few however long the answers."""
    bins = torch.bucketize(positions, _BOUNDS, right=True)
    counts, sums = bins.bincount(), bins.bincount(difference.abs().double())
    starts = [0, *_BOUNDS.tolist()]
    return {
        name.format(starts[index]): value
        for index, count in enumerate(counts.tolist())
        if count
        for name, value in zip(BY_POSITION, (float(sums[index]) / count, float(count)), strict=True)
    }


def bin_mismatch(sample: TrainingSample) -> list[tuple[int, float]]:
    """Return (sampled tokens of the trainer's own version, their mean |d|) of every `SAMPLE_BIN` positions of an answer."""
    difference, lags = _flatten([sample])
    bins, current = _positions(sample) // SAMPLE_BIN, lags == 0
    counts, sums = bins[current].bincount(), bins[current].bincount(difference[current].abs().double())
    return [(count, total / max(count, 1)) for count, total in zip(counts.tolist(), sums.tolist(), strict=True)]


def _positions(sample: TrainingSample) -> torch.Tensor:
    """Return the positions of the sampled tokens in the answer, int64 [A]."""
    return sample.target_positions - (len(sample.prompt_ids) - 1)


def measure_staleness(samples: list[TrainingSample]) -> dict[str, float]:
    """Return the tokens' ages in policy versions, the share of stale tokens with their |d| and k3, and the share of completions of several
    versions."""
    difference, lags = _flatten(samples)
    stale = difference[lags > 0]
    mean, oldest = (float(lags.double().mean()), float(lags.max())) if len(lags) else (0.0, 0.0)
    mixed = sum(len(sample.version_lags.unique()) > 1 for sample in samples) / max(len(samples), 1)
    metrics = dict(zip(AGES, (mean, oldest, len(stale) / max(len(lags), 1), mixed), strict=True))
    return metrics | (dict(zip(STALE_MISMATCH, (float(stale.abs().mean()), float(k3(stale).mean())), strict=True)) if len(stale) else {})


def _flatten(samples: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (d float32, version lags) [N] over all sampled tokens."""
    difference = torch.cat([sample.old_logprobs - sample.rollout_logprobs for sample in samples])
    lags = [sample.version_lags if len(sample.version_lags) else torch.zeros(len(sample.old_logprobs)) for sample in samples]
    return difference, torch.cat(lags)
