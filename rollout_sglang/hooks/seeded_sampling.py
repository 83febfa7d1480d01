"""Sampling that depends only on a completion's seed and the token's position, whatever else is in the engine's batch.

SGLang uses seeds only in its deterministic mode, which needs its GPU kernels. On the CPU tier every request has one, its own or a random
one; its token is the first whose cumulated probability exceeds a number in [0, 1) hashed from seed and position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def attach_seeds(original: Callable[..., Any], cls: type, batch: Any, *args: Any, **named: Any) -> Any:
    """Wrap `SamplingBatchInfo.from_schedule_batch`: add int64 seeds [requests], which SGLang keeps in step with its batches."""
    info = original(cls, batch, *args, **named)
    requested = [request.sampling_params.sampling_seed for request in batch.reqs]
    random = torch.randint(2**62, (len(requested),)).tolist()
    seeds = [random_seed if seed is None else seed for seed, random_seed in zip(requested, random, strict=True)]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
    return info


def sample_tokens(probs: torch.Tensor, sampling_seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Replace SGLang's `sampling_from_probs_torch`: return tokens int32 [n] of probs [n, vocabulary], seeds and positions [n]."""
    cumulated = probs.double().cumsum(-1)
    thresholds = torch.from_numpy(hash_to_uniform(sampling_seed.numpy(), positions.numpy()))[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, thresholds, right=True).clamp_(max=probs.shape[-1] - 1).view(-1).to(torch.int32)


def hash_to_uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float64 [n] in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of the seed, `positions` + 1 steps on."""
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
