"""How SGLang cuts a model: each engine rank's parameters as pieces of the checkpoint. Knows names and shapes, imports nothing of SGLang.

qkv_proj is [q ; k ; v] of the rank's heads (a kv head is replicated when there are more ranks than kv heads), gate_up_proj is
[gate ; up]. The vocabulary is padded to a multiple of 64: the padding is no piece of the checkpoint and is never written.
"""

from __future__ import annotations

from parallel.geometry import GeometryError, ModelGeometry, Piece, Rect, Shard, Tensor, cols_of, rows_of, stack, whole

_VOCAB_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE of vocab_parallel_embedding.py


def sglang_shards(model: ModelGeometry, tp: int, rank: int) -> list[Shard]:
    """All parameters of engine rank `rank` of `tp`, by SGLang's parameter names. Raises GeometryError where tp does not fit."""
    if model.heads % tp:
        raise GeometryError("rollout.tp", tp, f"must divide num_attention_heads ({model.heads})", f"use a divisor of {model.heads}")
    if max(model.kv_heads, tp) % min(model.kv_heads, tp):
        raise GeometryError(
            "rollout.tp", tp, f"must divide num_key_value_heads ({model.kv_heads}) or be a multiple of it", "use a power of two"
        )
    tensors = model.tensors()
    shards = [_vocabulary(tensors["model.embed_tokens.weight"], tp, rank)]
    for layer in range(model.layers):
        shards += _layer(model, tensors, f"model.layers.{layer}.", tp, rank)
    shards.append(stack("model.norm.weight", [whole(tensors["model.norm.weight"])]))
    if not model.tied:
        shards.append(_vocabulary(tensors["lm_head.weight"], tp, rank))
    return shards


def _layer(model: ModelGeometry, tensors: dict[str, Tensor], prefix: str, tp: int, rank: int) -> list[Shard]:
    def tensor(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    def same(name: str) -> Shard:
        return stack(f"{prefix}{name}.weight", [whole(tensor(name))])

    kv = [_kv_rows(model, tensor(f"self_attn.{part}_proj"), tp, rank) for part in "kv"]
    return [
        same("input_layernorm"),
        stack(f"{prefix}self_attn.qkv_proj.weight", [rows_of(tensor("self_attn.q_proj"), rank, tp), *kv]),
        same("self_attn.q_norm"),
        same("self_attn.k_norm"),
        stack(f"{prefix}self_attn.o_proj.weight", [cols_of(tensor("self_attn.o_proj"), rank, tp)]),
        same("post_attention_layernorm"),
        stack(f"{prefix}mlp.gate_up_proj.weight", [rows_of(tensor(f"mlp.{part}_proj"), rank, tp) for part in ("gate", "up")]),
        stack(f"{prefix}mlp.down_proj.weight", [cols_of(tensor("mlp.down_proj"), rank, tp)]),
    ]


def _kv_rows(model: ModelGeometry, tensor: Tensor, tp: int, rank: int) -> Piece:
    if tp <= model.kv_heads:
        return rows_of(tensor, rank, tp)
    return rows_of(tensor, rank * model.kv_heads // tp, model.kv_heads)


def _vocabulary(tensor: Tensor, tp: int, rank: int) -> Shard:
    padded = -(-tensor.rows // _VOCAB_PADDING) * _VOCAB_PADDING
    if padded % tp:
        padded = -(-tensor.rows // (_VOCAB_PADDING * tp)) * _VOCAB_PADDING * tp
    per_rank = padded // tp
    first = min(rank * per_rank, tensor.rows)
    rows = min(first + per_rank, tensor.rows) - first
    return Shard(tensor.name, per_rank, tensor.cols, (Piece(tensor, Rect(first, 0, rows, tensor.cols)),))
