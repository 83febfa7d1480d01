"""What `parallel.digest_triton` computes on a GPU, written as plain loops over words."""

from __future__ import annotations

import numpy as np
import torch

COLUMNS, RUN = 1024, 64
_STEP = np.uint64(6364136223846793005)


def run_sums(flat: torch.Tensor) -> torch.Tensor:
    """int64 [runs, 2] of uint8 [n]."""
    raw = flat.numpy().tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 4), dtype="<u4").astype(np.uint64)
    words = np.concatenate([words, np.zeros(-len(words) % (COLUMNS * RUN), dtype=np.uint64)]).reshape(-1, RUN, COLUMNS)
    found = np.zeros((len(words), COLUMNS), dtype=np.uint64)
    for row in range(RUN):
        found = found * _STEP + words[:, row]
    keys = np.array([_key(number) for number in range(2 * COLUMNS)], dtype=np.uint64).reshape(2, COLUMNS)
    sums = np.stack([(found * key).sum(1, dtype=np.uint64) for key in keys], axis=1)
    return torch.from_numpy(sums.view(np.int64))


def _key(number: int) -> int:
    """SplitMix64, made odd."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) | 1
