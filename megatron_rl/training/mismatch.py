"""Metrics of how the engine's log-probs differ from the trainer's: by precision for tokens of its own version, by age for older ones.

The difference d = trainer - engine of a stale token holds the optimizer steps since it was sampled. It says nothing about precision, so
it never counts in `mismatch/`, which is there to show that trainer and engine are the same policy.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithm.kl import k3
from megatron_rl.batch.training_sample import TrainingSample


def measure_mismatch(sequences: list[TrainingSample]) -> dict[str, float]:
    """|d| and the k3 estimate of KL(engine || trainer) over the tokens that the trainer's own version sampled; {} where there are none."""
    difference, ages = _tokens(sequences)
    same = difference[ages == 0]
    if not len(same):
        return {}
    return {
        "mismatch/abs_mean": float(same.abs().mean()),
        "mismatch/abs_max": float(same.abs().max()),
        "mismatch/k3_kl": float(k3(same).mean()),
    }


def measure_staleness(sequences: list[TrainingSample]) -> dict[str, float]:
    """Ages of the tokens in policy versions; of the stale ones their share, |d| and k3; the share of completions of several versions."""
    difference, ages = _tokens(sequences)
    stale = difference[ages > 0]
    found = {
        "staleness/mean": float(ages.double().mean()) if len(ages) else 0.0,
        "staleness/max": float(ages.max()) if len(ages) else 0.0,
        "staleness/share": len(stale) / max(len(ages), 1),
        "staleness/mixed": sum(len(sequence.version_lags.unique()) > 1 for sequence in sequences) / max(len(sequences), 1),
    }
    return found | ({"staleness/abs_mean": float(stale.abs().mean()), "staleness/k3_kl": float(k3(stale).mean())} if len(stale) else {})


def _tokens(sequences: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """(d float32, ages) of all sampled tokens, one after the other."""
    difference = torch.cat([sequence.old_logprobs - sequence.rollout_logprobs for sequence in sequences])
    ages = [sequence.version_lags if len(sequence.version_lags) else torch.zeros(len(sequence.old_logprobs)) for sequence in sequences]
    return difference, torch.cat(ages)
