"""How SGLang 0.5.23 shards a model: each engine rank's parameters as regions of the checkpoint. qkv_proj is [q ; k ; v] of the rank's
heads, with replicated kv heads if there are more ranks than kv heads. gate_up_proj is [gate ; up]. Experts are two tensors, w13_weight [E,
2I, H] = [gate ; up] each and w2_weight [E, H, I], stacked vertically here. With expert parallelism, tensor-parallel rank r holds the r //
(tp / ep)-th group of experts, which is cut over tp / ep ranks. MLA's q_a and kv_a are one replicated tensor. DeepSeek's shared experts are
modules of their own, so the engine needs --disable-shared-experts-fusion."""

from functools import lru_cache

from parallel.formats import FormatOf
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError, Region, Shard, Weight, cut_vocabulary, cut_weight, split, stack_regions

_VOCAB_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE of vocab_parallel_embedding.py
_FIELD = "rollout.tp"


def padded_vocabulary(vocab: int, tp: int) -> int:
    """Return the rows of SGLang's embedding over all ranks."""
    padded = -(-vocab // _VOCAB_PADDING) * _VOCAB_PADDING
    return padded if padded % tp == 0 else -(-vocab // (_VOCAB_PADDING * tp)) * _VOCAB_PADDING * tp


def build_sglang_shards(model: ModelGeometry, tp: int, rank: int, ep: int = 1) -> list[Shard]:
    """Return all parameters of rank `rank` of an engine of `tp` ranks, `ep` of them expert parallel, under SGLang's names. Raise
    GeometryError if the sizes do not fit the model."""
    check_sizes(model, tp, ep)
    return list(_shards(model, tp, rank, ep))


def build_engine_shards(model: ModelGeometry, tp: int, ep: int = 1, engines: int = 1) -> dict[int, list[Shard]]:
    """Return `build_sglang_shards` of all ranks of identical engines. Rank r of engine e has number e * tp + r."""
    return {rank: build_sglang_shards(model, tp, rank % tp, ep) for rank in range(engines * tp)}


def check_sizes(model: ModelGeometry, tp: int, ep: int) -> None:
    """Raise GeometryError if engines of these sizes cannot hold the model."""
    for kind in dict.fromkeys(model.attention):
        kind.check_ranks(tp, _FIELD)
    if tp % ep:
        raise GeometryError("rollout.ep", ep, f"must divide rollout.tp ({tp})", f"use a divisor of {tp}")
    if model.experts is not None and model.experts.dense_layers and not model.experts.dense_in_engine:
        rule = f"SGLang gives every layer of a {model.family} model experts, and would serve these layers with uninitialized weights"
        raise GeometryError("layers without experts", sorted(model.experts.dense_layers), rule, "use a model without dense layers")
    if model.experts is None and ep > 1:
        raise GeometryError("rollout.ep", ep, f"needs a model with experts, {model.family} has none", "set rollout.ep = 1")
    if model.experts is not None and model.experts.count % ep:
        raise GeometryError("rollout.ep", ep, f"must divide the number of experts ({model.experts.count})", "use a divisor of it")


def check_merged_layers(model: ModelGeometry, tp: int, format_of: FormatOf) -> None:
    """Raise GeometryError if a rank's rows of a layer that SGLang merges with others, such as q of [q ; k ; v ; z], are no whole blocks:
    SGLang refuses it, also where the checkpoint stores one tensor whose blocks are whole."""
    for weight in (weight for part in model.list_weights() for weight in part if weight.cut == "rows" and weight.expert is None):
        parts = weight.stacks if len(weight.stacks) > 1 else tuple((piece,) for piece in weight.pieces)
        block = format_of(weight.pieces[0].tensor.role).block
        if block is None or len(parts) == 1:
            continue
        for rows in (sum(region.tensor_rect.rows for region in part) for part in parts):
            if rows % (block[0] * tp):
                rule = f"of a layer that SGLang merges with others in it: each of {tp} engine ranks needs a multiple of {block[0]} rows"
                raise GeometryError(weight.sglang, f"{rows} rows", rule, "use a smaller rollout.tp, wider heads, or precision.mode = bf16")


def _shards(model: ModelGeometry, tp: int, rank: int, ep: int) -> tuple[Shard, ...]:
    return tuple(shard for part in range(model.layers + 2) for shard in build_part(model, tp, rank, ep, part))


@lru_cache(maxsize=1 << 16)
def build_part(model: ModelGeometry, tp: int, rank: int, ep: int, part: int) -> tuple[Shard, ...]:
    """Return a part of `build_sglang_shards`: 0 is the embedding, `1 + layer` a layer, and the last one what follows the layers."""
    shards = []
    stacks: dict[str, list[Weight]] = {}  # weights with the same name are stacked vertically
    for weight in model.list_part(part, ep, rank // (tp // ep)):
        stacks.setdefault(weight.sglang, []).append(weight)
    stacks.pop("", None)
    for name, stack in stacks.items():
        if stack[0].cut == "vocabulary":
            shards.append(cut_vocabulary(name, stack[0], padded_vocabulary(model.vocab, tp), rank, tp))
        else:
            stacked = stack[0].expert is not None and not stack[0].pieces[0].tensor.vector  # biases are one vector
            regions = [region for weight in stack for region in _cut(weight, tp, rank, ep)]
            shards.append(stack_regions(name, regions, experts=len(stack) * stacked))
    return tuple(shards)


def _cut(weight: Weight, tp: int, rank: int, ep: int) -> list[Region]:
    if weight.expert is not None:
        return cut_weight(weight, rank % (tp // ep), tp // ep, _FIELD)
    if weight.cut == "heads":
        parts = min(tp, weight.kv_heads)
        return [split(piece, "rows", rank * parts // tp, parts, _FIELD) for piece in weight.pieces]
    if weight.cut == "qkv":
        (q, *kv), parts = weight.pieces, min(tp, weight.kv_heads)
        return [split(q, "rows", rank, tp, _FIELD), *(split(x, "rows", rank * parts // tp, parts, _FIELD) for x in kv)]
    return cut_weight(weight, rank, tp, _FIELD)
