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
    for sample in samples:
        positions = sample.target_positions.numpy()
        counts, seeds = sample.seeds.view(-1, 2).T.numpy() if len(sample.seeds) else ([len(positions)], np.array([UNKNOWN]))
        seeds_A = seeds.repeat(counts)
        numbers = np.where(seeds_A == UNKNOWN, -1.0, hash_to_uniform(seeds_A, positions))
        spread = _hash((step, sample.number, _SPREAD), positions)
        checked = _hash((step, sample.number // _NEIGHBORS, _CHOICE), positions // _BLOCK) < share
        if len(sample.version_lags):
            checked &= sample.version_lags.numpy() == 0
        sample.draws = torch.from_numpy(np.stack([numbers, np.where(checked, spread, np.nan)], -1))


def unmark_draws(samples: Iterable[TrainingSample]) -> None:
    """Let later passes check nothing."""
    for sample in samples:
        sample.draws = torch.empty(0)


def _hash(parts: tuple[int, int, int], positions: np.ndarray) -> np.ndarray:
    step, number, use = parts
    seed = hash_to_uniform(np.array([step << 34 | number << 2 | use]), np.zeros(1)) * 2.0**62
    return hash_to_uniform(seed.astype(np.int64), positions)
