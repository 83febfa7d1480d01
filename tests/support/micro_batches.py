"""Where the sampled tokens of a packed micro-batch lie."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample


def iter_target_positions(batch: MicroBatch, samples: list[TrainingSample]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index of the sample, int64 [A]: positions in the row whose targets are its sampled tokens)."""
    return batch.split_by_sample(torch.arange(batch.mask.shape[1]).unsqueeze(0), samples)
