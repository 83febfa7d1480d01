"""Finds out whether a layout keeps quantized blocks whole, and if not, the nearest layouts that do. If the shards of both sides keep the
checkpoint's blocks whole, every transfer consists of whole blocks, so trainer and engine are checked separately. Layers of the same kind
are alike, so only the first layers are checked, up to the first of the last kind."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from parallel.formats import FormatOf
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards, check_layout
from parallel.model_geometry import ModelGeometry
from parallel.reshard import check_block_alignment
from parallel.sglang_shards import build_engine_shards, check_merged_layers, check_sizes
from parallel.shards import GeometryError


def find_trainer_problem(model: ModelGeometry, layout: Layout, format_of: FormatOf) -> GeometryError | None:
    """Return why a training layout cannot work, or None if it can."""

    def check() -> None:
        few, one = keep_shapes(model, layout)
        check_block_alignment(build_trainer_shards(few, one, format_of=format_of), format_of)

    return _catch(check)


def find_engine_problem(model: ModelGeometry, tp: int, ep: int, format_of: FormatOf) -> GeometryError | None:
    """Return why an engine of `tp` ranks, `ep` of them expert parallel, cannot work, or None if it can."""

    def check() -> None:
        few = keep_first_layers(model)
        check_sizes(few, tp, ep)
        check_block_alignment(build_engine_shards(_keep_two_experts(few, ep), tp, ep), format_of)
        check_merged_layers(few, tp, format_of)

    return _catch(check)


def _catch(check: Callable[[], None]) -> GeometryError | None:
    try:
        check()
    except GeometryError as error:
        return error
    return None


def find_nearest_layouts(model: ModelGeometry, layout: Layout, format_of: FormatOf, count: int = 2) -> list[Layout]:
    """Return the `count` working training layouts nearest to `layout`. Layouts with the same number of ranks come first."""
    stage_ranks = layout.tp * layout.dp  # without context parallelism
    candidates = []
    for tp, etp, ep in _sort_by_distance(model, (layout.tp, layout.etp, layout.ep)):
        fewest = math.lcm(tp, etp * ep)
        ranks = stage_ranks if stage_ranks % fewest == 0 else fewest
        candidates.append(replace(layout, tp=tp, etp=etp, ep=ep, dp=ranks // tp))
    candidates.sort(key=lambda candidate: candidate.world_size != layout.world_size)  # stable, so it keeps the order of distance
    working = (candidate for candidate in candidates if find_trainer_problem(model, candidate, format_of) is None)
    return list(islice(working, count))


def find_nearest_engines(model: ModelGeometry, tp: int, ep: int, format_of: FormatOf, count: int = 2) -> list[tuple[int, int]]:
    """Return the `count` working (tp, ep) of an engine that are nearest to the given sizes."""
    sizes = _sort_by_distance(model, (tp, tp // math.gcd(tp, ep), ep))
    candidates = [(near_tp, near_ep) for near_tp, near_etp, near_ep in sizes if near_tp == near_etp * near_ep]
    return list(islice((candidate for candidate in candidates if find_engine_problem(model, *candidate, format_of) is None), count))


def add_layout_hints(
    error: GeometryError, model: ModelGeometry, train: Layout, rollout: EngineLayout, format_of: FormatOf
) -> GeometryError:
    """Return the error with the nearest working layouts at the start of its fix."""
    hints = []
    if find_trainer_problem(model, train, format_of):
        nearest_layouts = find_nearest_layouts(model, train, format_of)
        layouts = [f"tp={near.tp}" + (f" ep={near.ep} etp={near.etp}" if model.experts else "") for near in nearest_layouts]
        hints.append(f"train layouts that work: {' or '.join(layouts) or 'none'}")
    if find_engine_problem(model, rollout.tp, rollout.ep, format_of):
        nearest = find_nearest_engines(model, rollout.tp, rollout.ep, format_of)
        engines = [f"tp={tp}" + (f" ep={ep}" if model.experts else "") for tp, ep in nearest]
        hints.append(f"rollout layouts that work: {' or '.join(engines) or 'none'}")
    return GeometryError(error.field, error.value, error.rule, "; ".join([*hints, error.fix]) if hints else error.fix)


def keep_first_layers(model: ModelGeometry) -> ModelGeometry:
    """Return the shortest prefix of the model that contains every kind of layer."""
    kinds = [model.layer_kind(layer) for layer in range(model.layers)]
    return replace(model, attention=model.attention[: 1 + max(map(kinds.index, model.layer_kinds))])


def keep_shapes(model: ModelGeometry, layout: Layout) -> tuple[ModelGeometry, Layout]:
    """Return a model and a layout of few layers, experts and ranks with the same shapes of shards. Raise GeometryError as
    `build_megatron_shards` does for sizes that do not divide the model."""
    model, layout = keep_first_layers(model), keep_one_replica(layout)
    check_layout(model, layout)
    return _keep_two_experts(model), keep_one_replica(replace(layout, ep=1, cp=1, dp=layout.dp * layout.cp))


def _keep_two_experts(model: ModelGeometry, ep: int = 1) -> ModelGeometry:
    """Return the model with at most two experts on each of `ep` ranks: the second one shows whether a stack of them keeps blocks whole."""
    experts = model.experts
    return model if experts is None else replace(model, experts=replace(experts, count=ep * min(2, experts.count // ep)))


def keep_one_replica(layout: Layout) -> Layout:
    """Return the layout with one pipeline stage and as few replicas as possible. It has the same shards, each fewer times."""
    return replace(layout.one_stage, cp=1, dp=math.lcm(layout.tp, layout.ep * layout.etp) // layout.tp)


@lru_cache(maxsize=1 << 14)
def keep_rank_sizes(layout: Layout) -> Layout:
    """Return `keep_one_replica` with context parallelism: a key of caches for what depends on neither stages nor replicas."""
    ranks = layout.tp * layout.cp
    return replace(layout.one_stage, dp=math.lcm(ranks, layout.ep * layout.etp) // ranks)


def keep_one_layer_per_kind(model: ModelGeometry) -> ModelGeometry:
    """Return a model of one layer for each of `model.layer_kinds`, in their order."""
    dense = frozenset(number for number, kind in enumerate(model.layer_kinds) if not kind.has_experts)
    experts = model.experts and replace(model.experts, dense_layers=dense)
    return replace(model, attention=tuple(kind.attention for kind in model.layer_kinds), experts=experts)


def _sort_by_distance(model: ModelGeometry, sizes: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Return all (tp, expert tp, ep) made of divisors of heads and expert count, nearest to `sizes` first."""
    tps = list_divisors(math.gcd(*(count for kind in set(model.attention) for count in kind.head_counts.values())), most=64)
    if model.experts is None:
        candidates = [(tp, tp, 1) for tp in tps]
    else:
        candidates = [(tp, etp, ep) for tp in tps for etp in tps for ep in list_divisors(model.experts.count, most=64)]

    def distance(candidate: tuple[int, int, int]) -> tuple[float, tuple[int, int, int]]:
        return sum(abs(math.log2(a / b)) for a, b in zip(candidate, sizes, strict=True)), candidate

    return sorted(candidates, key=distance)


def list_divisors(number: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]
