"""A completion's draws: by seed and position alone, and with the right frequencies."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.rollout.worker import derive_seed
from rollout_sglang.hooks.seeded_sampling import hash_to_uniform, sample_tokens


def probabilities(rows: int, columns: int) -> torch.Tensor:
    return torch.softmax(2 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)), -1)


def test_a_draw_does_not_depend_on_its_company():
    probs, positions = probabilities(64, 300), torch.arange(64) * 3
    seeds = torch.tensor([derive_seed(0, 1, "train/0", index) for index in range(64)])
    tokens = sample_tokens(probs, seeds, positions)
    assert tokens.dtype == torch.int32 and tokens.shape == (64,)
    for row in range(64):
        assert sample_tokens(probs[row : row + 1], seeds[row : row + 1], positions[row : row + 1])[0] == tokens[row]
    for other in (sample_tokens(probs, seeds, positions + 1), sample_tokens(probs, seeds + 1, positions)):
        assert not torch.equal(other, tokens)


def test_frequencies_are_the_probabilities():
    probs, count = probabilities(1, 12), 40_000
    seeds = torch.tensor([derive_seed(0, 0, "train/0", index) for index in range(count // 40)]).repeat_interleave(40)
    tokens = sample_tokens(probs.expand(count, 12), seeds, torch.arange(count) % 40)
    result = torch.bincount(tokens.long(), minlength=12) / count
    error = (probs[0] * (1 - probs[0]) / count).sqrt()
    assert ((result - probs[0]).abs() < 5 * error).all()


def test_what_has_no_probability_is_never_drawn():
    probs = torch.zeros(5000, 4)
    probs[:, 1], probs[:, 3] = 0.25, 0.75
    tokens = sample_tokens(probs, torch.arange(5000), torch.zeros(5000, dtype=torch.int64))
    assert set(tokens.tolist()) == {1, 3}


def test_the_hash_is_splitmix64():
    """The generator's published first outputs from seed 0 (its state after one and two steps), as numbers in [0, 1)."""
    result = hash_to_uniform(np.array([0, 0]), np.array([0, 1]))
    assert result.tolist() == [(0xE220A8397B1DCDAF >> 11) * 2.0**-53, (0x6E789E6AA1B965F4 >> 11) * 2.0**-53]


def test_seeds_differ_by_run_version_purpose_and_completion():
    draws = [(0, 1, "eval", 0), (1, 1, "eval", 0), (0, 2, "eval", 0), (0, 1, "train/0", 0), (0, 1, "eval", 1)]
    seeds = {derive_seed(*draw) for draw in draws}
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, 1, "eval", 0) == derive_seed(0, 1, "eval", 0)
