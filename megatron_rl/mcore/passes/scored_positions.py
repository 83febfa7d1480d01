"""The positions of a micro-batch that are scored, those whose target is a sampled token: only for them are logits computed.

The product with the output layer, and what follows it over the whole vocabulary, is a large part of a small model's pass. Prompts,
padding, and tokens that an environment wrote need none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.kernels.device_copy import copy_to_device
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.mcore.passes.logprobs import Targets


@dataclass(frozen=True)
class ScoredPositions:
    """Some of a context-parallel rank's positions [1, t / cp] of a row."""

    index: torch.Tensor
    """int64 [n], at least one."""
    length: int
    """t / cp."""

    @classmethod
    def of(cls, mask: torch.Tensor) -> ScoredPositions:
        """Return the positions [1, t / cp] that `mask` names."""
        index = mask[0].nonzero().squeeze(1)
        return cls(index if len(index) else index.new_zeros(1), mask.shape[1])

    def to(self, device: torch.device) -> ScoredPositions:
        """Return a copy with the positions on `device`."""
        return ScoredPositions(copy_to_device(self.index, device), self.length)

    def select(self, row: torch.Tensor) -> torch.Tensor:
        """Return [n, ...] of a row [1, t / cp, ...]."""
        return row[0, self.index]

    def select_targets(self, batch: MicroBatch, shard: ContextShard, temperature: float) -> Targets:
        """Return the n targets of a micro-batch."""
        kept = self.select(shard.select(batch.kept_tokens)) if len(batch.kept_tokens) else None
        return Targets(self.select(shard.select(batch.targets)), temperature, kept)

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """Return the row [1, t / cp] of values [1, n], 0 elsewhere, with gradient."""
        return values.new_zeros(1, self.length).index_copy(1, self.index, values)
