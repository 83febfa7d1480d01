"""A model as its family describes it (`parallel.families`): widths, what a forward pass computes, and every weight."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from parallel.adapters import AdapterGeometry, add_adapters
from parallel.attention import AttentionKind
from parallel.families import load_family
from parallel.hf_config import CORRECT, MOST_EXPERT_LAYERS, HFConfig, Rope
from parallel.shards import GeometryError, HFTensor, Weight, make_vector, make_weight, no_garbage_collection
from parallel.wrappers import DECODER, VISION, WRAPPER, add_prefix, check_wrapper, unwrap

VALUE_HEAD = "score.weight"  # name of the value head in transformers' classification models with one label
_CRITIC, _TRAINS_MTP = "megatron_rl_critic", "megatron_rl_trains_mtp"


@dataclass(frozen=True)
class MoEGeometry:
    """A mixture of `count` experts of width `ffn`, and shared experts of total width `shared_ffn` (0: none)."""

    count: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()  # layers that have a plain MLP instead
    dense_in_engine: bool = True  # whether SGLang builds dense layers. If not, it gives every layer experts.
    correction_bias: bool = False  # whether the router adds a learned bias when it chooses experts
    top_k: int = 1  # experts per token
    sigmoid: bool = False  # whether scores are sigmoids of the logits instead of a softmax over all experts
    normalized: bool = True  # whether the chosen experts' weights add up to `scale`
    scale: float = 1.0
    groups: int = 1  # number of equal groups of experts, of which a token may use `groups_used`
    groups_used: int = 1
    shared_gate: bool = False  # whether the sigmoid of a projection multiplies the result of the shared experts
    swiglu_limit: float = 0.0
    """If above 0, router and experts are those of gpt-oss: they have biases, rows of gate and up alternate, and SwiGLU clamps both."""

    @property
    def shared_name(self) -> str:
        """Name of the shared experts in checkpoints and in SGLang."""
        return "shared_expert" if self.shared_gate else "shared_experts"


class LayerKind(NamedTuple):
    """What layers of a kind have in common."""

    attention: AttentionKind
    has_experts: bool


@dataclass(frozen=True)
class ModelGeometry:
    """A decoder-only model, read from a Hugging Face config.json."""

    family: str  # `model_type` of config.json, and name of the module in `parallel.families`
    attention: tuple[AttentionKind, ...]  # of each layer
    hidden: int
    ffn: int
    vocab: int
    tied: bool = False  # whether the output layer shares the embedding's weight
    tied_in_engine: bool = True  # with `tied`, whether SGLang's output layer shares the embedding too
    norm_eps: float = 1e-6  # of all norms but those of latent queries and keys, see `attention.latent.LATENT_NORM_EPS`
    zero_centered_norms: bool = False  # whether norms multiply by 1 + weight, except those of a gated delta net's heads
    post_norms: bool = False  # whether the outputs of attention and MLP are normalized before they are added to the residual stream
    kv_scales: bool = False  # whether each layer has a scale for cached keys and one for cached values; no checkpoint has them
    experts: MoEGeometry | None = None
    prefix: str = "model."  # of the decoder's tensors in the checkpoint, but not in SGLang
    value_head: bool = False  # whether the model is a critic, with a value head instead of the output layer (`as_critic`)
    mtp_layers: int = 0
    """Layers for multi-token prediction in the checkpoint. A run that does not train them copies them (`megatron_rl.hf.mtp_layers`)."""
    trains_mtp: bool = False  # whether these layers are trained, as part of the last pipeline stage (`with_trained_mtp`)
    adapters: AdapterGeometry | None = None  # LoRA adapters, from the configuration's section `[lora]`

    def __hash__(self) -> int:
        """Hash few fields, because geometries are keys of caches and have hundreds of layers."""
        return hash((self.family, len(self.attention), self.hidden, self.vocab, self.value_head, self.trains_mtp))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """Read a config.json. Raise GeometryError for an unknown family, a missing field, or an unsupported setting."""
        family, fields = load_family((config := unwrap(config)).get("model_type")), HFConfig(config)
        name = family.__name__.rpartition(".")[2]
        model: ModelGeometry = replace(family.read(fields), family=name, prefix=check_wrapper(fields, name))
        fields.refuse_unread()
        if model.experts is not None and (total := (model.layers + model.mtp_layers) * model.experts.count) > MOST_EXPERT_LAYERS:
            rule = f"gives all layers together {total:,} experts, more than {MOST_EXPERT_LAYERS:,}"
            raise GeometryError("config.json num_hidden_layers", model.layers, rule, CORRECT)
        for field, rotated in dict.fromkeys(kind.rotated for kind in model.attention):
            if rotated % 2:
                raise GeometryError(f"config.json {field}", rotated, "elements of a head rotate in pairs", CORRECT)
        if config.get(_TRAINS_MTP):
            return replace(model, trains_mtp=model.mtp_layers > 0)
        return replace(model, tied=False, tied_in_engine=True, value_head=True) if config.get(_CRITIC) else model

    @staticmethod
    def resolve_config(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with the family's own `model_type` and architecture, its defaults for absent fields, and without unknown
        fields: an engine may have other defaults or none, and act on a field that is null. Of a wrapper (`parallel.wrappers`), return that
        of the decoder. Raise GeometryError as `from_hf_config` does."""
        family, fields = load_family((config := unwrap(config)).get("model_type")), HFConfig(config)
        family.read(fields)
        check_wrapper(fields, family.__name__.rpartition(".")[2])
        named = {"model_type": family.__name__.rpartition(".")[2], "architectures": [family.ARCHITECTURE]}
        unknown = fields.refuse_unread()
        return {**{name: value for name, value in config.items() if name not in {*unknown, WRAPPER}}, **fields.defaults, **named}

    @staticmethod
    def describe_to_engine(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `resolve_config` as an engine gets it, which may serve the family as another one."""
        describe: Callable[..., dict[str, Any]] = getattr(load_family(unwrap(config).get("model_type")), "describe_to_engine", dict)
        return describe(ModelGeometry.resolve_config(config))

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def most_tokens(self) -> int | None:
        """Longest sequence for which trainer and engine compute this model, or None for any length."""
        return min((kind.most_tokens for kind in self.attention if kind.most_tokens is not None), default=None)

    @property
    def rope(self) -> Rope:
        """Rotary positions of all layers that have any."""
        return next((kind.rope for kind in self.attention if kind.rope is not None), Rope())

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers in the order of their first layer."""
        return _list_layer_kinds(self)

    @property
    def unquantized_modules(self) -> tuple[str, ...]:
        """Names of linear layers in high precision that an engine would quantize unless config.json names them, in checkpoints and in
        SGLang; the output layer and routers are none of them."""
        kinds = dict.fromkeys(name for kind in self.attention for name in kind.unquantized_modules)
        gate = ("shared_expert_gate",) if self.experts is not None and self.experts.shared_gate else ()
        return (*kinds, *gate, *(("visual",) if self.prefix == DECODER else ()))

    def layer_kind(self, layer: int) -> LayerKind:
        return LayerKind(self.attention[layer], self.has_experts(layer))

    def attention_of(self, layer: int) -> AttentionKind:
        """Return the attention of a layer. Layers for multi-token prediction, numbered after the others, have that of the last layer with
        a cache of tokens."""
        if layer < self.layers:
            return self.attention[layer]
        return next(kind for kind in reversed(self.attention) if kind.has_cache_by_position)

    def shares_heads(self, ranks: int) -> bool:
        """Return whether `ranks` ranks can have equally many heads of every kind."""
        return all(count % ranks == 0 for kind in set(self.attention) for count in kind.head_counts.values())

    @property
    def row_parallel_widths(self) -> dict[str, int]:
        """Number of values that each row-parallel layer sums, by the layer's name in checkpoints; without routed experts."""
        widths = {f"{kind.module}.{kind.output[0]}": kind.output[1] for kind in self.attention}
        if self.experts is None or self.experts.dense_layers:
            widths["mlp.down_proj"] = self.ffn
        if self.experts is not None and self.experts.shared_ffn:
            widths[f"mlp.{self.experts.shared_name}.down_proj"] = self.experts.shared_ffn
        return widths

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def attention_length(self) -> float:
        """Sequence length at which causal attention takes as many FLOPs as everything that does not grow with the sequence."""
        share = self.experts.top_k / self.experts.count if self.experts else 1.0
        weights = (weight for part in replace(self, trains_mtp=False).list_weights()[1:] for weight in part)
        met = sum(rect.rows * rect.cols * (1 if weight.expert is None else share) for weight in weights for _, rect, *_ in weight.pieces)
        per_position = sum(kind.flops_per_position for kind in self.attention)
        return (2 * met + sum(kind.flops_per_token for kind in self.attention)) / per_position if per_position else math.inf

    def list_weights(self) -> tuple[tuple[Weight, ...], ...]:
        """Return all parts (`list_part`) in order."""
        return _list_weights(self)

    def list_part(self, part: int, ep: int = 1, ep_rank: int = 0) -> tuple[Weight, ...]:
        """Return a part's weights: 0 is the embedding, `1 + layer` a layer, and the last one the final norm, trained MTP layers and output
        layer. With `ep` > 1, only the experts of the `ep_rank`-th of `ep` expert-parallel ranks are included."""
        return _list_part(self, part) if ep == 1 else _keep_own_experts(self, part, ep, ep_rank)

    def tensors(self) -> dict[str, HFTensor]:
        """Return every tensor of the checkpoint by its Hugging Face name, as a shared dictionary that must not be changed."""
        return _list_tensors(self)

    def list_kept(self, layers: Iterable[int] | None = None) -> dict[str, HFTensor]:
        """Return the tensors of layers that neither trainer nor engine has, by name; by default those of all but MTP layers."""
        kinds = ((layer, self.attention_of(layer)) for layer in (range(self.layers) if layers is None else layers))
        kept = (kind.list_kept(layer, self.hidden, f"model.layers.{layer}.{kind.module}.") for layer, kind in kinds)
        return {tensor.name: tensor for of_layer in kept for tensor in of_layer}

    def is_kept_tensor(self, name: str) -> bool:
        """Return whether a checkpoint name belongs to an indexer of sparse attention."""
        return self.most_tokens is not None and ".self_attn.indexer." in name

    def is_mtp_tensor(self, name: str) -> bool:
        """Return whether a checkpoint name belongs to a layer for multi-token prediction."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        after_others = layer is not None and self.layers <= int(layer[1]) < self.layers + self.mtp_layers
        return after_others or (self.mtp_layers > 0 and name.startswith("mtp."))

    def is_vision_tensor(self, name: str) -> bool:
        """Return whether a checkpoint name belongs to the vision tower of a wrapper."""
        return self.prefix == DECODER and name.startswith(VISION)


def as_critic(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that describes the same decoder with a value head (`VALUE_HEAD`) instead of the output layer."""
    return {**config, _CRITIC: True}


def with_trained_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that describes the same model with trained layers for multi-token prediction."""
    return {**config, _TRAINS_MTP: True}


@lru_cache(maxsize=256)
def _list_layer_kinds(model: ModelGeometry) -> tuple[LayerKind, ...]:
    return tuple(dict.fromkeys(map(model.layer_kind, range(model.layers))))


@lru_cache(maxsize=32)
@no_garbage_collection()
def _list_weights(model: ModelGeometry) -> tuple[tuple[Weight, ...], ...]:
    return tuple(_list_part(model, part) for part in range(model.layers + 2))


@lru_cache(maxsize=1 << 12)
def _list_part(model: ModelGeometry, part: int) -> tuple[Weight, ...]:
    weights = _list_decoder_part(model, part)
    return tuple(weights if model.prefix == "model." else add_prefix(weights, model.prefix))


def _list_decoder_part(model: ModelGeometry, part: int) -> Iterable[Weight]:
    family, embedding = load_family(model.family), HFTensor("model.embed_tokens.weight", model.vocab, model.hidden, "embedding")
    if part == 0:
        return [make_weight(embedding, "embedding.word_embeddings.weight", "vocabulary")]
    if part <= model.layers:
        return add_adapters(family.list_layer(model, part - 1), model.adapters)
    head = embedding if model.tied else HFTensor("lm_head.weight", model.vocab, model.hidden, "lm_head")
    output = make_weight(head, "output_layer.weight", "vocabulary", "lm_head.weight")
    if model.value_head:
        output = make_weight(HFTensor(VALUE_HEAD, 1, model.hidden, "value_head"), "output_layer.weight", "whole")
    return [
        make_vector("model.norm.weight", model.hidden, "decoder.final_layernorm.weight"),
        *(weight for number in range(model.mtp_layers if model.trains_mtp else 0) for weight in family.list_mtp_layer(model, number)),
        output._replace(sglang="") if model.tied and model.tied_in_engine else output,
    ]


@lru_cache(maxsize=1 << 12)
def _keep_own_experts(model: ModelGeometry, part: int, ep: int, ep_rank: int) -> tuple[Weight, ...]:
    count = model.experts.count // ep if model.experts else 0
    own = {None, *range(ep_rank * count, (ep_rank + 1) * count)}
    return tuple(weight for weight in _list_part(model, part) if weight.expert in own)


@lru_cache(maxsize=32)
def _list_tensors(model: ModelGeometry) -> dict[str, HFTensor]:
    pieces = (piece for part in _list_weights(model) for weight in part for piece in weight.pieces)
    return {piece.tensor.name: piece.tensor for piece in pieces}
