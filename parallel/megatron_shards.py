"""How Megatron-Core shards a model: each rank's parameters as regions of the checkpoint. linear_qkv holds [q heads of g | k_g | v_g] for
each query group g, with gates [q heads of g | their gates | k_g | v_g]; ranks own equal ranges of these rows. in_proj_qkvz of a gated delta
net is, per rank, [q ; k ; v ; z] of its heads, and linear_fc1 [its rows of gate ; its rows of up]. linear_proj, out_proj and linear_fc2 are
cut by columns. Norms, routers and MLA's down projections are replicated. Experts are cut in the same way, by the layout's ep and etp.
Layers and experts are numbered over the whole model, while Megatron counts from 0 on every rank. `mlp.router.expert_bias` is a buffer in
Megatron; everything else is a parameter."""

from functools import lru_cache

from parallel.formats import BF16, FormatOf, TensorFormat
from parallel.layout import Coordinates, Layout, check_stages, list_stage_layers
from parallel.model_geometry import ModelGeometry
from parallel.shards import (
    REPLICATED,
    GeometryError,
    Region,
    Shard,
    Weight,
    cut_vocabulary,
    cut_weight,
    find_misaligned_region,
    stack_regions,
    take_rows,
)


def padded_vocabulary(vocab: int, tp: int) -> int:
    """Return the rows of Megatron's embedding: `vocab` rounded up to a multiple of `tp`."""
    return -(-vocab // tp) * tp


def build_megatron_shards(
    model: ModelGeometry, layout: Layout, coordinates: Coordinates, *, format_of: FormatOf = lambda _: BF16
) -> list[Shard]:
    """Return all parameters of the rank at `coordinates`. Raise GeometryError if the layout does not divide the model. With `format_of`,
    rows are in the order in which the trainer quantizes them (see `compute_row_order`)."""
    check_layout(model, layout)
    first_replica = Coordinates(tp=coordinates.tp, pp=coordinates.pp, ep=coordinates.ep, etp=coordinates.etp)  # shared by all replicas
    return list(_shards(model, layout, first_replica, format_of("attention_qkv")))


def build_trainer_shards(model: ModelGeometry, layout: Layout, *, format_of: FormatOf = lambda _: BF16) -> dict[int, list[Shard]]:
    """Return `build_megatron_shards` of every rank of a layout."""
    ranks = range(layout.world_size)
    return {rank: build_megatron_shards(model, layout, layout.coordinates(rank), format_of=format_of) for rank in ranks}


@lru_cache(maxsize=1024)
def compute_row_order(shard: Shard, format: TensorFormat) -> list[int] | None:
    """Return the row order in which a parameter is quantized, or None if it is the parameter's own: row i of the blocks is row `order[i]`.
    The blocks then are those of the rank's [q ; k ; v]. Quantize `weight[order]`, and undo the order with the inverse permutation."""
    reordered = reorder_for_quantization(shard, format)
    if reordered.regions == shard.regions:
        return None
    own, wanted = (
        [(tensor.name, row) for tensor, rect, *_ in each.regions for row in range(rect.row, rect.row + rect.rows)]
        for each in (shard, reordered)
    )
    row_of = {tensor_row: row for row, tensor_row in enumerate(own)}
    return [row_of[tensor_row] for tensor_row in wanted]


def check_layout(model: ModelGeometry, layout: Layout) -> None:
    """Raise GeometryError if a layout does not divide a model's heads, layers or experts."""
    for kind in dict.fromkeys(model.attention):
        kind.check_ranks(layout.tp, "train.layout.tp")
    check_stages(model.layers, layout)
    if model.experts is not None and model.experts.swiglu_limit and layout.etp > 1:
        rule = f"is not supported for {model.family}, because Megatron's experts with biases are not cut over ranks"
        raise GeometryError("train.layout.etp", layout.etp, rule, "set train.layout.etp = 1")
    if model.experts is None and layout.ep > 1:
        raise GeometryError("train.layout.ep", layout.ep, f"needs a model with experts, {model.family} has none", "set train.layout.ep = 1")
    if model.experts is not None and (count := model.experts.count) % layout.ep:
        raise GeometryError("train.layout.ep", layout.ep, f"must divide the number of experts ({count})", f"use a divisor of {count}")


@lru_cache(maxsize=1024)
def _shards(model: ModelGeometry, layout: Layout, coordinates: Coordinates, qkv: TensorFormat) -> tuple[Shard, ...]:
    weights = _list_rank_weights(model, layout, coordinates)
    return tuple(reorder_for_quantization(_cut(weight, model, layout, coordinates), qkv) for weight in weights)


def _list_rank_weights(model: ModelGeometry, layout: Layout, coordinates: Coordinates) -> list[Weight]:
    first_stage, last_stage = coordinates.pp == 0, coordinates.pp == layout.pp - 1

    def list_part(part: int) -> tuple[Weight, ...]:
        return model.list_part(part, layout.ep, coordinates.ep)

    weights = list(list_part(0)) if first_stage else []
    for layer in list_stage_layers(model.layers, layout, coordinates.pp):
        weights += list_part(1 + layer)
    if last_stage:  # keeps its own copy of a tied embedding
        last = list_part(1 + model.layers)
        weights += last[:-1] if first_stage and model.tied else last
    return weights


def build_held_shards(
    model: ModelGeometry, layout: Layout, rank: int, *, format_of: FormatOf = lambda _: BF16
) -> list[tuple[Shard, tuple[int, ...]]]:
    """Return `build_megatron_shards` of a rank, each with the ranks that hold the same part of the checkpoint."""
    at = layout.coordinates(rank)
    shards = build_megatron_shards(model, layout, at, format_of=format_of)
    weights = _list_rank_weights(model, layout, at)
    return [(shard, _find_holders(weight, model, layout, at)) for shard, weight in zip(shards, weights, strict=True)]


def _find_holders(weight: Weight, model: ModelGeometry, layout: Layout, at: Coordinates) -> tuple[int, ...]:
    is_cut = weight.cut not in REPLICATED or bool(weight.stacks)
    stages = (0, layout.pp - 1) if model.tied and weight.cut == "vocabulary" else (at.pp,)
    if weight.expert is None:
        return _list_ranks(layout, stages, at.tp if is_cut else None, None, None)
    return _list_ranks(layout, stages, None, at.ep, at.etp if is_cut else None)


@lru_cache(maxsize=1024)
def _list_ranks(layout: Layout, stages: tuple[int, ...], tp: int | None, ep: int | None, etp: int | None) -> tuple[int, ...]:
    """Return the ranks of some pipeline stages at these coordinates, where None is any."""
    wanted = tp, ep, etp
    found = []
    for rank, (stage, *own) in enumerate(_list_coordinates(layout)):
        if stage in stages and all(value is None or value == each for value, each in zip(wanted, own, strict=True)):
            found.append(rank)
    return tuple(found)


@lru_cache(maxsize=16)
def _list_coordinates(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return (pp, tp, ep, etp) of every rank."""
    return [(at.pp, at.tp, at.ep, at.etp) for at in map(layout.coordinates, range(layout.world_size))]


def _cut(weight: Weight, model: ModelGeometry, layout: Layout, coordinates: Coordinates) -> Shard:
    if weight.cut == "vocabulary":
        return cut_vocabulary(weight.megatron, weight, padded_vocabulary(model.vocab, layout.tp), coordinates.tp, layout.tp)
    if weight.stacks:
        regions = [region for stack in weight.stacks for region in _cut_stack(stack, coordinates.tp, layout.tp)]
    elif weight.expert is None:
        regions = cut_weight(weight, coordinates.tp, layout.tp, "train.layout.tp")
    else:
        regions = cut_weight(weight, coordinates.etp, layout.etp, "train.layout.etp")
    return stack_regions(weight.megatron, regions)


def _cut_stack(stack: tuple[Region, ...], part: int, parts: int) -> list[Region]:
    """Return a rank's range of the rows of regions that are stacked vertically."""
    size = sum(region.tensor_rect.rows for region in stack)
    if size % parts:
        names = ", ".join(dict.fromkeys(region.tensor.name for region in stack))
        raise GeometryError("train.layout.tp", parts, f"must divide the {size} rows of {names} together", "choose a smaller size")
    first, last, row, regions = part * size // parts, (part + 1) * size // parts, 0, list[Region]()
    for tensor, rect, *_ in stack:
        start, end = max(first, row), min(last, row + rect.rows)
        if start < end:
            regions.append(take_rows(tensor, rect.row + start - row, end - start))
        row += rect.rows
    return regions


def reorder_for_quantization(shard: Shard, format: TensorFormat) -> Shard:
    """Return the shard in the checkpoint's order, such as [q ; k ; v], if quantizing the rows of its heads would cut blocks."""
    if not shard.name.endswith(("linear_qkv.weight", "in_proj_qkvz.weight")) or find_misaligned_region(shard, format) is None:
        return shard
    tensors = [region.tensor for region in shard.regions]  # q, k and v, or one tensor that stacks them
    return stack_regions(shard.name, sorted(shard.regions, key=lambda region: (tensors.index(region.tensor), region.tensor_rect.row)))
