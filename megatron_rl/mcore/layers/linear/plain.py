"""Megatron's layers whose weights autograd's own operators use."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

from megatron_rl.mcore.layers.linear.weight_gradient import take_weights


class PlainColumnParallelLinear(ColumnParallelLinear):
    """Each of two micro-batches under way adds its own gradients to the buffers."""

    def forward(self, *args: Any, **options: Any) -> Any:
        with take_weights(self):
            return super().forward(*args, **options)


class Embedding(VocabParallelEmbedding):
    """The same."""

    def forward(self, input_: Any) -> Any:
        with take_weights(self):
            return super().forward(input_)


def install_embedding(model: GPTModel) -> None:
    """Make a built model's embedding, whose class Megatron names itself, an `Embedding`."""
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = Embedding
