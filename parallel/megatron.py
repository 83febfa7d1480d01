"""How Megatron-Core cuts a model: each rank's parameters as pieces of the checkpoint.

linear_qkv holds, per query group g, [the q heads of g | k_g | v_g]; a tensor-parallel rank owns whole groups. linear_fc1 is, per
rank, [its rows of gate ; its rows of up]. linear_proj and linear_fc2 split columns. Norms are replicated.
"""

from __future__ import annotations

from parallel.geometry import GeometryError, ModelGeometry, Piece, Rect, Shard, Tensor, cols_of, rows_of, stack, whole
from parallel.layout import Coordinates, Layout


def megatron_shards(model: ModelGeometry, layout: Layout, place: Coordinates) -> list[Shard]:
    """All parameters of the rank at `place`, named as in Megatron with global layer numbers.

    Raises GeometryError where tensor or pipeline sizes do not divide the model.
    """
    if model.kv_heads % layout.tp:
        raise GeometryError(
            "layout.tp", layout.tp, f"must divide num_key_value_heads ({model.kv_heads})", f"use a divisor of {model.kv_heads}"
        )
    if model.layers % layout.pp:
        raise GeometryError("layout.pp", layout.pp, f"must divide num_hidden_layers ({model.layers})", f"use a divisor of {model.layers}")
    tensors = model.tensors()
    per_stage = model.layers // layout.pp
    shards: list[Shard] = []
    if place.pp == 0:
        shards.append(_rows("embedding.word_embeddings.weight", tensors["model.embed_tokens.weight"], layout, place))
    for layer in range(place.pp * per_stage, (place.pp + 1) * per_stage):
        shards += _layer(model, tensors, layer, layout, place)
    if place.pp == layout.pp - 1:
        shards.append(_whole("decoder.final_layernorm.weight", tensors["model.norm.weight"]))
        if not model.tied:
            shards.append(_rows("output_layer.weight", tensors["lm_head.weight"], layout, place))
        elif layout.pp > 1:  # the last stage keeps its own copy of the tied embedding
            shards.append(_rows("output_layer.weight", tensors["model.embed_tokens.weight"], layout, place))
    return shards


def _layer(model: ModelGeometry, tensors: dict[str, Tensor], layer: int, layout: Layout, place: Coordinates) -> list[Shard]:
    hf, mcore = f"model.layers.{layer}.", f"decoder.layers.{layer}."

    def tensor(name: str) -> Tensor:
        return tensors[f"{hf}{name}.weight"]

    gate_up = [rows_of(tensor(f"mlp.{part}_proj"), place.tp, layout.tp) for part in ("gate", "up")]
    return [
        _whole(mcore + "input_layernorm.weight", tensor("input_layernorm")),
        _qkv(model, mcore + "self_attention.linear_qkv.weight", [tensor(f"self_attn.{part}_proj") for part in "qkv"], layout, place),
        _whole(mcore + "self_attention.q_layernorm.weight", tensor("self_attn.q_norm")),
        _whole(mcore + "self_attention.k_layernorm.weight", tensor("self_attn.k_norm")),
        _cols(mcore + "self_attention.linear_proj.weight", tensor("self_attn.o_proj"), layout, place),
        _whole(mcore + "pre_mlp_layernorm.weight", tensor("post_attention_layernorm")),
        stack(mcore + "mlp.linear_fc1.weight", gate_up),
        _cols(mcore + "mlp.linear_fc2.weight", tensor("mlp.down_proj"), layout, place),
    ]


def _qkv(model: ModelGeometry, name: str, qkv: list[Tensor], layout: Layout, place: Coordinates) -> Shard:
    per_rank = model.kv_heads // layout.tp
    heights = [model.heads // model.kv_heads * model.head_dim, model.head_dim, model.head_dim]  # rows of q, k, v in one group
    pieces = []
    for group in range(place.tp * per_rank, (place.tp + 1) * per_rank):
        for tensor, height in zip(qkv, heights, strict=True):
            pieces.append(Piece(tensor, Rect(group * height, 0, height, tensor.cols)))
    return stack(name, pieces)


def _whole(name: str, tensor: Tensor) -> Shard:
    return stack(name, [whole(tensor)])


def _rows(name: str, tensor: Tensor, layout: Layout, place: Coordinates) -> Shard:
    return stack(name, [rows_of(tensor, place.tp, layout.tp)])


def _cols(name: str, tensor: Tensor, layout: Layout, place: Coordinates) -> Shard:
    return stack(name, [cols_of(tensor, place.tp, layout.tp)])
