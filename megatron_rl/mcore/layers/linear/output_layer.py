"""Megatron's output layer that can give the log-probs of some positions in place of logits.

It is the layer itself, within the model's pass, so that hooks on it still run: Megatron's DDP gathers weights in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from megatron_rl.mcore.passes import two_batch
from megatron_rl.mcore.passes.logprobs import Targets, score_tokens, token_logprobs


class OutputLayer(ColumnParallelLinear):
    """Gives logits [t, b, vocab / tp]; within `score_positions` log-probs [n, 1], or [n, 1, 2] with entropies."""

    _scored = two_batch.OfMicroBatch()
    """(positions, targets, with entropies)"""

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (what the class says, no bias). input_ [t, b, h], [t / tp, b, h] under sequence parallelism; b = 1 to score. `weight`
        is that of the embedding where the two are tied."""
        if self._scored is None:
            return super().forward(input_, weight, runtime_gather_output)
        positions, targets, with_entropy = self._scored
        spread = gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        hidden = spread(input_, group=self.tp_group)[:, 0].index_select(0, positions)
        weight = self.weight if weight is None else weight
        keep_logits = self.config.recompute_granularity is None
        if with_entropy:
            return torch.stack(score_tokens(hidden, weight, targets, keep_logits), -1).unsqueeze(1), None
        return token_logprobs(hidden, weight, targets, keep_logits).unsqueeze(1), None


def install_output_layer(model: GPTModel) -> None:
    """Make a built model's output layer, whose class Megatron's GPTModel names itself, an `OutputLayer`."""
    if model.post_process:
        model.output_layer.__class__ = OutputLayer


@contextmanager
def score_positions(model: GPTModel, positions: torch.Tensor, targets: Targets, with_entropy: bool) -> Iterator[None]:
    """Within the context the model's last stage gives, of one row, the log-probs [1, n] of `targets` at `positions` int64 [n], with
    gradient; `with_entropy` log-probs and entropies [1, n, 2]."""
    layer: Any = model.output_layer if model.post_process else None
    if layer is None:
        yield
        return
    layer._scored = positions, targets, with_entropy
    try:
        yield
    finally:
        layer._scored = None
