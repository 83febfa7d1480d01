"""The positions of a micro-batch that are scored, those whose target is a sampled token: only for them are logits computed.

The product with the output layer, and what follows it over the whole vocabulary, is a large part of a small model's pass. Prompts,
padding, and tokens that an environment wrote need none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.mcore.context_parallel import ContextShard


@dataclass(frozen=True)
class ScoredPositions:
    """Some of a context-parallel rank's positions [1, t / cp] of a row."""

    index: torch.Tensor
    """int64 [n], at least one."""
    length: int
    """t / cp."""

    @classmethod
    def of(cls, mask: torch.Tensor, model: GPTModel) -> ScoredPositions:
        """Return the positions [1, t / cp] that `mask` names; all of them under sequence parallelism, where each rank holds a part of
        the row of its own."""
        scored = mask[0] != 0
        if model.config.sequence_parallel:
            scored = torch.ones_like(scored)
        index = scored.nonzero().squeeze(1)
        return cls(index if len(index) else index.new_zeros(1), len(scored))

    def select(self, row: torch.Tensor) -> torch.Tensor:
        """Return [1, n, ...] of a row [1, t / cp, ...]."""
        return row[:, self.index]

    def select_targets(self, batch: MicroBatch, shard: ContextShard) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return targets [1, n], and the tokens kept [1, n, most] (`MicroBatch.kept_tokens`), None for all."""
        kept = self.select(shard.select(batch.kept_tokens)) if len(batch.kept_tokens) else None
        return self.select(shard.select(batch.targets)), kept

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """Return the row [1, t / cp] of values [1, n], 0 elsewhere, with gradient."""
        return values.new_zeros(1, self.length).index_copy(1, self.index, values)

    @contextmanager
    def restrict_logits(self, model: GPTModel) -> Iterator[None]:
        """Within the context the model's last stage gives logits [1, n, vocab / tp] of these positions."""
        if not model.post_process or len(self.index) == self.length:
            yield
            return

        def select_hidden(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return args[0].index_select(0, self.index), *args[1:]  # [t / cp, 1, h]

        handle = model.output_layer.register_forward_pre_hook(select_hidden)
        try:
            yield
        finally:
            handle.remove()
