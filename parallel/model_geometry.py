"""A model as its family describes it (`parallel.families`): widths, what a forward pass computes, and every weight.

`parallel.megatron_shards` and `parallel.sglang_shards` say which parts of the weights each rank holds, in the vocabulary of
`parallel.shards`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from parallel.adapters import AdapterGeometry, add_adapters
from parallel.families import load_family
from parallel.hf_config import HFConfig, Rope
from parallel.shards import HFTensor, Shard, take_all
from parallel.weights import Weight, make_vector, make_weight

VALUE_HEAD = "score.weight"
"""Of transformers' models for classification, with one label."""
_CRITIC, _TRAINS_MTP = "megatron_rl_critic", "megatron_rl_trains_mtp"


@dataclass(frozen=True)
class MoEGeometry:
    """A mixture of experts: `count` MLPs of width `ffn`, and shared ones of total width `shared_ffn` (0: none)."""

    count: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()
    """Layers that have a plain MLP instead."""
    dense_in_engine: bool = True
    """SGLang builds these too; otherwise it gives every layer experts."""
    correction_bias: bool = False
    """The router adds a learnt bias when it chooses."""
    top_k: int = 1
    """Experts of a token."""
    sigmoid: bool = False
    """Scores are sigmoids of the logits; otherwise a softmax over all experts."""
    normalized: bool = True
    """The chosen experts' weights add up to `scale`."""
    scale: float = 1.0
    groups: int = 1
    """Experts form this many equal groups, of which a token may use `groups_used`."""
    groups_used: int = 1


@dataclass(frozen=True)
class MLAGeometry:
    """Multi-latent attention (MLA): queries and keys/values through low-rank projections."""

    q_rank: int
    """0: queries are projected directly."""
    kv_rank: int
    nope_dim: int
    """Width of a query or key head without position."""
    rope_dim: int
    """Width of its part with rotary position; the key's is shared by all heads."""
    v_dim: int


@dataclass(frozen=True)
class ModelGeometry:
    """A decoder-only model, read from a Hugging Face config.json."""

    family: str
    """`model_type` of the config.json, and the name of the module in `parallel.families`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query head; with `latent` its parts with and without position together."""
    ffn: int
    vocab: int
    tied: bool = False
    """The output layer shares the embedding's weight."""
    tied_in_engine: bool = True
    """With `tied`, SGLang's output layer is the embedding itself; otherwise a parameter of its own."""
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    """q and k heads are normalised."""
    post_norms: bool = False
    """What attention and MLP add to the residual stream is normalised too."""
    kv_scales: bool = False
    """Each layer has a scale of its keys and one of its values in the cache: two more numbers, in trainer and engine but in no
    checkpoint. No config.json says so, but the precision contract."""
    rope: Rope = field(default_factory=Rope)
    experts: MoEGeometry | None = None
    latent: MLAGeometry | None = None
    value_head: bool = False
    """A critic: a value in the place of logits (`as_critic`)."""
    mtp_layers: int = 0
    """Layers for multi-token prediction that a checkpoint may hold behind the others: kept as they are (`megatron_rl.hf.mtp_layers`),
    unless a run trains them."""
    trains_mtp: bool = False
    """These layers are built and trained, as weights of the last pipeline stage (`with_trained_mtp`)."""
    adapters: AdapterGeometry | None = None
    """LoRA: weights beside those of the checkpoint. No config.json says so, but the section `[lora]`."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """Read a config.json. Raise GeometryError for an unknown family, a missing field, or what the trainer does not compute."""
        model: ModelGeometry = load_family(config.get("model_type")).read(HFConfig(config))
        if config.get(_TRAINS_MTP):
            return replace(model, trains_mtp=model.mtp_layers > 0)
        return replace(model, tied=False, tied_in_engine=True, value_head=True) if config.get(_CRITIC) else model

    @property
    def row_parallel_widths(self) -> dict[str, int]:
        """The numbers that a row-parallel layer sums, by the layer's name in checkpoints; without experts, which other ranks share."""
        value_dim = self.latent.v_dim if self.latent else self.head_dim
        widths = {"self_attn.o_proj": self.heads * value_dim}
        if self.experts is None or self.experts.dense_layers:
            widths["mlp.down_proj"] = self.ffn
        if self.experts is not None and self.experts.shared_ffn:
            widths["mlp.shared_experts.down_proj"] = self.experts.shared_ffn
        return widths

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def attention_length(self) -> float:
        """The length of a sequence whose causal attention takes as many FLOPs as its products with weights.

        2 for each weight that a token meets, against s (d_qk + d_v) for each head of a layer at mean position s / 2.
        """
        share = self.experts.top_k / self.experts.count if self.experts else 1.0
        weights = (weight for part in replace(self, trains_mtp=False).list_weights()[1:] for weight in part)
        met = sum(rect.rows * rect.cols * (1 if weight.expert is None else share) for weight in weights for _, rect, *_ in weight.pieces)
        value_dim = self.latent.v_dim if self.latent else self.head_dim
        return 2 * met / (self.layers * self.heads * (self.head_dim + value_dim))

    def list_weights(self, ep: int = 1, ep_rank: int = 0) -> tuple[tuple[Weight, ...], ...]:
        """Return the embedding, each layer's weights, and last the final norm, layers for multi-token prediction that are trained, and the
        output layer; of the experts only those of the `ep_rank`-th of `ep` expert-parallel ranks."""
        return _list_weights(self) if ep == 1 else _keep_own_experts(self, ep, ep_rank)

    def tensors(self) -> dict[str, HFTensor]:
        """Return every tensor of the checkpoint by its Hugging Face name; the same dictionary at each call, not to be changed."""
        return _list_tensors(self)

    def is_mtp_tensor(self, name: str) -> bool:
        """Return whether a name of a checkpoint is one of a layer for multi-token prediction."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return layer is not None and self.layers <= int(layer[1]) < self.layers + self.mtp_layers

    def build_checkpoint_shards(self) -> list[Shard]:
        """Return the checkpoint itself as shards: every tensor whole."""
        return [Shard(tensor.name, tensor.rows, tensor.cols, (take_all(tensor),)) for tensor in self.tensors().values()]


def as_critic(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that describes the same decoder with a value head: `VALUE_HEAD` in the place of the output layer."""
    return {**config, _CRITIC: True}


def with_trained_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that describes the same model with its layers for multi-token prediction among the weights that are trained."""
    return {**config, _TRAINS_MTP: True}


@lru_cache(maxsize=32)
def _list_weights(model: ModelGeometry) -> tuple[tuple[Weight, ...], ...]:
    embedding = HFTensor("model.embed_tokens.weight", model.vocab, model.hidden, "embedding")
    head = embedding if model.tied else HFTensor("lm_head.weight", model.vocab, model.hidden, "lm_head")
    output = make_weight(head, "output_layer.weight", "vocabulary", "lm_head.weight")
    if model.value_head:
        output = make_weight(HFTensor(VALUE_HEAD, 1, model.hidden, "value_head"), "output_layer.weight", "whole")
    family = load_family(model.family)
    return (
        (make_weight(embedding, "embedding.word_embeddings.weight", "vocabulary"),),
        *(_list_layer(model, layer) for layer in range(model.layers)),
        (
            make_vector("model.norm.weight", model.hidden, "decoder.final_layernorm.weight"),
            *(weight for number in range(model.mtp_layers if model.trains_mtp else 0) for weight in family.list_mtp_layer(model, number)),
            output._replace(sglang="") if model.tied and model.tied_in_engine else output,
        ),
    )


def _list_layer(model: ModelGeometry, layer: int) -> tuple[Weight, ...]:
    weights = tuple(load_family(model.family).list_layer(model, layer))
    return weights if model.adapters is None else add_adapters(weights, model.adapters)


@lru_cache(maxsize=256)
def _keep_own_experts(model: ModelGeometry, ep: int, ep_rank: int) -> tuple[tuple[Weight, ...], ...]:
    count = model.experts.count // ep if model.experts else 0
    own = {None, *range(ep_rank * count, (ep_rank + 1) * count)}
    return tuple(tuple(weight for weight in part if weight.expert in own) for part in _list_weights(model))


@lru_cache(maxsize=32)
def _list_tensors(model: ModelGeometry) -> dict[str, HFTensor]:
    pieces = (piece for part in _list_weights(model) for weight in part for piece in weight.pieces)
    return {piece.tensor.name: piece.tensor for piece in pieces}
