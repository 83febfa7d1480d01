"""The random numbers of sampled tokens. An engine that draws by seed takes, for the token after a position, the first token whose
cumulative probability exceeds `hash_to_uniform(seed, position)`, so that a trainer with the same distribution can repeat the draw. The
trainer chooses the tokens that it checks, and gives each of them another random number: the draw's place within the token's probability."""

from collections.abc import Iterable

import numpy as np
import torch

from megatron_rl.batch.training_sample import TrainingSample

UNKNOWN = -1  # seed of tokens that were drawn by a generator of the engine's own
_SPREAD, _CHOICE = 1, 2  # what the trainer's own numbers are for
_BLOCK, _NEIGHBORS = 32, 8  # positions and samples that are chosen together, so that neighbors can be compared


def hash_to_uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float64 `[n]` in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of the seed after `positions` + 1 steps."""
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mark_draws(samples: Iterable[TrainingSample], step: int, share: float = 1.0) -> None:
    """Set `TrainingSample.draws` of samples with columns: a `share` of the tokens that the trainer's own version sampled is checked. The
    choice is a hash of step, sample, and position; neighbors are chosen together."""
    samples = list(samples)
    if not samples:
        return
    places = [sample.target_positions.numpy() for sample in samples]
    counts, positions = [len(each) for each in places], np.concatenate(places)
    turns = [sample.seeds.numpy() if len(sample.seeds) else (len(each), UNKNOWN) for sample, each in zip(samples, places, strict=True)]
    lengths, seeds = np.concatenate(turns).reshape(-1, 2).T
    seeds_A = seeds.repeat(lengths)
    numbers = np.where(seeds_A == UNKNOWN, -1.0, hash_to_uniform(seeds_A, positions))
    number = np.array([sample.number for sample in samples])
    spread = _hash(step, number, _SPREAD, counts, positions)
    checked = _hash(step, number // _NEIGHBORS, _CHOICE, counts, positions // _BLOCK) < share
    drawn = torch.from_numpy(np.stack([numbers, np.where(checked, spread, np.nan)], -1))
    for sample, draws in zip(samples, drawn.split(counts), strict=True):
        sample.draws = draws
        if len(sample.version_lags):
            draws[sample.version_lags > 0, 1] = torch.nan


def unmark_draws(samples: Iterable[TrainingSample]) -> None:
    """Let later passes check nothing."""
    for sample in samples:
        sample.draws = torch.empty(0)


def _hash(step: int, numbers: np.ndarray, use: int, counts: list[int], positions: np.ndarray) -> np.ndarray:
    """Return uniform numbers of positions, `counts` of which belong to each of the samples with `numbers`."""
    seeds = hash_to_uniform(step << 34 | numbers << 2 | use, np.zeros(1)) * 2.0**62
    return hash_to_uniform(seeds.astype(np.int64).repeat(counts), positions)
