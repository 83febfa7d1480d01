"""Metrics of how the engine's log-probs differ from the trainer's: by precision for tokens of its own version, by staleness for older ones.

The difference d = trainer - engine of a stale token holds the optimizer steps since it was sampled. It says nothing about precision, so
it never counts in `mismatch/`, which shows that trainer and engine are the same policy.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithm.kl import k3
from megatron_rl.batch.training_sample import TrainingSample


def measure_mismatch(samples: list[TrainingSample]) -> dict[str, float]:
    """Return |d| and the k3 estimate of KL(engine || trainer) over the tokens of the trainer's own version; {} if there are none."""
    difference, lags = _flatten(samples)
    current = difference[lags == 0]
    if not len(current):
        return {}
    return {
        "mismatch/abs_mean": float(current.abs().mean()),
        "mismatch/abs_max": float(current.abs().max()),
        "mismatch/k3_kl": float(k3(current).mean()),
    }


def measure_staleness(samples: list[TrainingSample]) -> dict[str, float]:
    """Return the tokens' ages in policy versions, the share of stale tokens with their |d| and k3, and the share of completions of several
    versions."""
    difference, lags = _flatten(samples)
    stale = difference[lags > 0]
    metrics = {
        "staleness/mean": float(lags.double().mean()) if len(lags) else 0.0,
        "staleness/max": float(lags.max()) if len(lags) else 0.0,
        "staleness/share": len(stale) / max(len(lags), 1),
        "staleness/mixed": sum(len(sample.version_lags.unique()) > 1 for sample in samples) / max(len(samples), 1),
    }
    return metrics | ({"staleness/abs_mean": float(stale.abs().mean()), "staleness/k3_kl": float(k3(stale).mean())} if len(stale) else {})


def _flatten(samples: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (d float32, version lags) [N] over all sampled tokens."""
    difference = torch.cat([sample.old_logprobs - sample.rollout_logprobs for sample in samples])
    lags = [sample.version_lags if len(sample.version_lags) else torch.zeros(len(sample.old_logprobs)) for sample in samples]
    return difference, torch.cat(lags)
