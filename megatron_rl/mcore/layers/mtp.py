"""Training of multi-token prediction (MTP) layers: Megatron's block behind the last pipeline stage, with a loss of its own.

    layer k at position i reads the hidden state of layer k - 1 and token i + k, and predicts token i + k + 1

The loss is the cross-entropy of the response tokens. Hidden state, embedding and output layer are detached, as with verl's
`detach_encoder` and in AReaL: the policy's pass, loss and gradient are the same bits as without MTP. The gradient norm for clipping
excludes MTP layers, and only the forward pass of a training step runs them.

Megatron would roll tokens and labels itself. Here a `Lookahead` is built from the whole micro-batch beforehand, which needs no
communication between context-parallel ranks, and logits only for response tokens.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.kernels.device_copy import copy_to_device
from megatron_rl.mcore.base.names import override
from megatron_rl.mcore.base.two_batch import PerMicroBatch
from megatron_rl.mcore.layers.attention.core_attention import CoreAttention
from megatron_rl.mcore.layers.linear.high_precision import PlainColumnParallelLinear
from megatron_rl.mcore.layers.linear.norms import RMSNorm
from megatron_rl.mcore.layers.linear.output_layer import Entropy, score_positions
from megatron_rl.mcore.layers.spec import build_layer_spec
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.mcore.passes.logprobs import ScoredPositions, Targets


@dataclass
class Lookahead:
    """Inputs, targets and resulting log-probs of this rank's MTP layers in a micro-batch, with one entry per layer."""

    tokens: torch.Tensor  # int64 [layers, t / cp]: input tokens
    scored: list[ScoredPositions]
    targets: list[torch.Tensor]  # int64 [n] at the scored positions
    masks: list[torch.Tensor]  # [1, t]: 1 where a sampled token is predicted
    shard: ContextShard
    logprobs: list[torch.Tensor]  # float32 [1, n] with gradient, from the last pass. Empty except on the last pipeline stage.

    @classmethod
    def from_micro_batch(cls, batch: MicroBatch, shard: ContextShard, layers: int) -> Lookahead:
        """Return the lookahead of a micro-batch, on the CPU."""
        steps = range(1, layers + 1)
        masks = [batch.shift(batch.mask, step) for step in steps]
        scored = [ScoredPositions.from_mask(shard.select(mask)) for mask in masks]
        targets = [places.select(shard.select(batch.shift(batch.targets, step))) for places, step in zip(scored, steps, strict=True)]
        tokens = torch.cat([shard.select(batch.shift(batch.targets, step - 1)) for step in steps])
        return cls(tokens, scored, targets, masks, shard, [])

    def to(self, device: torch.device) -> Lookahead:
        """Return a copy on `device`."""
        tokens, *rest = (copy_to_device(x, device) for x in (self.tokens, *self.targets, *self.masks))
        targets, masks = rest[: len(self.targets)], rest[len(self.targets) :]
        return Lookahead(tokens, [scored.to(device) for scored in self.scored], targets, masks, self.shard.to(device), [])

    def compute_loss(self) -> torch.Tensor:
        """Return the summed cross-entropy of response tokens, averaged over layers, with gradient. The same on all context-parallel
        ranks."""
        rows = zip(self.scored, self.logprobs, self.masks, strict=True)
        sums = [(self.shard.gather_row(scored.restore(logprobs)) * mask).sum() for scored, logprobs, mask in rows]
        return -torch.stack(sums).mean()


class LookaheadLayer(MultiTokenPredictionLayer):
    """Megatron's MTP layer with given input tokens: `input_ids` [remaining layers, t / cp]."""

    def _get_embeddings(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, embedding: Any, hidden_states: torch.Tensor, **_: Any
    ) -> tuple[Any, ...]:
        with torch.no_grad():
            embedded = embedding(input_ids=input_ids[:1], position_ids=position_ids)
        return input_ids[1:], position_ids, None, embedded, hidden_states


class LookaheadModel(GPTModel):
    """A GPTModel with MTP layers (`mtp`) on its last stage, which run within `look_ahead`. If the last stage is not the first, it holds a
    copy of the embedding that is neither trained nor saved; `copy_embedding` fills it."""

    _lookahead = PerMicroBatch()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._embedding_copy: list[LanguageModelEmbedding] = []  # in a list, so that it is not a submodule that is saved or stepped
        if not self.post_process:
            return
        config = copy.copy(self.config)
        config.mtp_num_layers = config.trained_mtp_layers
        self.mtp = MultiTokenPredictionBlock(config, _build_spec(config), self.vp_stage, self.pg_collection)
        for parameter in self.mtp.parameters():
            parameter.shared = True  # excludes the parameter from Megatron's gradient norm
        for core in (module for module in self.mtp.modules() if isinstance(module, CoreAttention)):
            core.quantizes_kv, core.kv_scales = False, None  # no engine caches MTP layers
        if not self.pre_process:
            last = LanguageModelEmbedding(config, self.vocab_size, self.max_sequence_length, "rope", tp_group=self.pg_collection.tp)
            self._embedding_copy.append(last.requires_grad_(False))

    def _postprocess(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        result = super()._postprocess(hidden_states, **options)
        if self.post_process and self._lookahead is not None:
            self._predict(self._lookahead, hidden_states, options)
        return result

    def _predict(self, ahead: Lookahead, hidden_states: torch.Tensor, options: dict[str, Any]) -> None:
        states = self.mtp(
            input_ids=ahead.tokens,
            hidden_states=hidden_states.detach().requires_grad_(),  # a recomputed layer has gradients only if its input requires one
            embedding=self._embedding_copy[0] if self._embedding_copy else self.embedding,
            **{name: options[name] for name in ("position_ids", "attention_mask", "rotary_pos_emb", "packed_seq_params")},
        )
        weight = self.output_layer.weight.detach()
        for state, scored, tokens in zip(states.chunk(1 + len(ahead.scored))[1:], ahead.scored, ahead.targets, strict=True):
            with score_positions(self, scored.index, Targets(tokens, 1.0), Entropy.NONE):
                ahead.logprobs.append(self.output_layer(state, weight=weight)[0].transpose(0, 1))

    def look_ahead(self, ahead: Lookahead) -> AbstractContextManager[None]:
        """Return a context manager in which a forward pass also fills `ahead.logprobs`."""
        return override([self], "_lookahead", ahead)


def copy_embedding(chunks: list[Any]) -> None:
    """Send the embedding of the first pipeline stage to its copy on the last stage. Collective over both; the weight must be gathered."""
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if is_first == is_last:  # an intermediate stage
        return
    embedding = chunks[0].embedding if is_first else chunks[-1]._embedding_copy[0]
    dist.broadcast(embedding.word_embeddings.weight.data, group=parallel_state.get_embedding_group(), group_src=0)


def _build_spec(config: Any) -> MultiTokenPredictionBlockSubmodules:
    """Return the spec of the MTP block: decoder layers like the model's last ones, and a high-precision projection."""
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=RMSNorm,
        hnorm=RMSNorm,
        eh_proj=PlainColumnParallelLinear,
        mtp_model_layer=build_layer_spec(config, config.num_moe_experts),
        layer_norm=RMSNorm,
    )
    return MultiTokenPredictionBlockSubmodules([ModuleSpec(LookaheadLayer, submodules=parts)] * config.trained_mtp_layers)
