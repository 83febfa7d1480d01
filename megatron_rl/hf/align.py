"""Widens a model without changing its function, so that ranks cut its matrices at whole blocks: adds rows and columns of zeros.

Attention heads are added in whole groups: a key-value head with its query heads, all of whose weights are zero. Added values are zero, have
zero gradients (one factor of every product is zero) and stay zero in training. RMSNorm averages over the wider vector. With h elements in
h',

    x / sqrt(sum(x^2) / h + eps) * w  =  x / sqrt(sum(x^2) / h' + eps * h / h') * w * sqrt(h / h')

so its weight is scaled, and kept in float32 to avoid rounding; config.json's eps is scaled too. Norms of q and k heads, whose width stays,
share that eps, where the change is negligible.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_rl.precision.contract import QUANTIZED_ROLES
from parallel.attention import LatentAttention, SoftmaxAttention
from parallel.digest import view_rect
from parallel.formats import BF16, FP8, TensorFormat
from parallel.layout import Layout
from parallel.layout_hints import find_engine_problem, find_trainer_problem
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError, HFTensor, Region

_MOST = 1 << 16
"""Maximum of block times ranks: all numbers of groups of heads up to it are tried."""


class Alignment(NamedTuple):
    """Block size and rank counts to which widths are aligned."""

    block: int  # rows and columns of a block
    tp: int = 1  # ranks that shard attention, MLPs and shared experts
    etp: int = 0  # ranks that shard an expert; 0 means `tp`


def align_config(hf_config: Mapping[str, Any], alignment: Alignment) -> dict[str, Any]:
    """Return the config.json of the narrowest aligned model. It is equal if all widths are aligned already. Raises GeometryError if the
    family refuses the model, or `tp` does not divide the vocabulary."""
    block, tp, etp = alignment.block, alignment.tp, alignment.etp or alignment.tp
    if block * max(tp, etp) > _MOST:
        raise GeometryError("--align", block, f"times the number of ranks ({max(tp, etp)}) must be at most {_MOST:,}", "use 128 for FP8")
    model = ModelGeometry.from_hf_config(hf_config)
    if model.vocab % tp:
        rule = f"must divide vocab_size ({model.vocab}), which cannot be padded: rows of zeros would take part in the softmax"
        raise GeometryError("--tensor-parallel", tp, rule, "use a divisor of it")
    if model.experts is None and etp != tp:
        raise GeometryError("--expert-tensor-parallel", etp, f"needs a model with experts, {model.family} has none", "leave it out")
    config = {**hf_config, "intermediate_size": _round_up(model.ffn, block * tp)}
    if model.experts is not None:
        shared = model.experts.shared_ffn // model.experts.ffn  # shared experts are this many times as wide, and sharded over tp
        config["moe_intermediate_size"] = _round_up(model.experts.ffn, math.lcm(block * etp, block * tp // math.gcd(block * tp, shared)))
    for kind in dict.fromkeys(model.attention):
        if not kind.can_widen:
            raise GeometryError("--align", block, f"cannot widen {kind.module}, which {model.family} has", "leave it out")
        if isinstance(kind, SoftmaxAttention):
            config["head_dim"] = kind.head_dim
        elif isinstance(kind, LatentAttention) and kind.q_rank:
            config["q_lora_rank"] = _round_up(kind.q_rank, block)
    config |= _add_groups(model, config, block, tp)
    heads = _count_heads(model)[0]
    divided = model.hidden % heads == 0  # must stay true: transformers requires it of Llama
    hidden = _round_up(model.hidden, math.lcm(block, config["num_attention_heads"] if divided else 1))
    if hidden != model.hidden:
        config |= {"hidden_size": hidden, "rms_norm_eps": model.norm_eps * model.hidden / hidden}
    return config


def _add_groups(model: ModelGeometry, config: Mapping[str, Any], block: int, tp: int) -> dict[str, int]:
    """Return the fewest heads with which no rank of trainer or engine cuts a block."""
    (count, least), blocks = _count_heads(model), replace(FP8, block=(block, block))

    def format_of(role: str) -> TensorFormat:
        return blocks if role in QUANTIZED_ROLES else BF16

    for groups in range(least, least + block * tp):  # a multiple of block * tp is among them
        heads = {"num_attention_heads": groups * (count // least), "num_key_value_heads": groups}
        wide = ModelGeometry.from_hf_config({**config, **heads})
        attention = replace(wide, experts=None, attention=wide.attention[:1])
        if not (find_trainer_problem(attention, Layout(tp=tp), format_of) or find_engine_problem(attention, tp, 1, format_of)):
            return heads
    raise AssertionError(f"no number of heads fits blocks of {block} on {tp} ranks")


def _count_heads(model: ModelGeometry) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads."""
    kind = model.attention[0]
    return kind.heads, kind.kv_heads if isinstance(kind, SoftmaxAttention) else kind.heads


def _round_up(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


def is_scaled(tensor: HFTensor, wide: ModelGeometry) -> bool:
    """Return whether a tensor is the weight of a norm that is wider in `wide`."""
    return tensor.role == "norm" and tensor.rows != wide.tensors()[tensor.name].rows


def widen(
    read: Callable[[Region], torch.Tensor], model: ModelGeometry, wide: ModelGeometry, names: Iterable[str] | None = None
) -> Iterator[tuple[HFTensor, torch.Tensor]]:
    """Yield the tensors of `wide`, all or only `names`, filled from `model`: [rows, cols], or [rows] for a vector. They keep their dtype,
    except that scaled norm weights are float32. `read` returns a region of a tensor of `model`."""
    pieces: dict[str, dict[Region, Region]] = {}  # by tensor; a tied tensor belongs to two weights
    for narrow_part, wide_part in zip(model.list_weights(), wide.list_weights(), strict=True):
        for narrow_weight, wide_weight in zip(narrow_part, wide_part, strict=True):
            for piece, place in zip(narrow_weight.pieces, wide_weight.pieces, strict=True):
                pieces.setdefault(place.tensor.name, {})[place] = piece
    for name in pieces if names is None else names:
        tensor, places, result = wide.tensors()[name], pieces[name], None
        for place, piece in places.items():
            value = read(piece)
            if is_scaled(piece.tensor, wide):
                value = (value.double() * math.sqrt(piece.tensor.rows / tensor.rows)).float()
            if result is None:
                result = value.new_zeros(tensor.rows if tensor.vector else (tensor.rows, tensor.cols))
            view_rect(result, place.tensor_rect._replace(rows=piece.tensor_rect.rows, cols=piece.tensor_rect.cols)).copy_(value)
        assert result is not None
        yield tensor, result
