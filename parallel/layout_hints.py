"""Which layouts work: whether one side's shards keep FP8 blocks whole, and the nearest sizes that do where they do not.

A copy between two shards that both keep the checkpoint's blocks whole is whole blocks too, so trainer and engine are judged apart;
and layers of one kind are alike, so at most one dense layer and one with experts are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import check_block_alignment
from parallel.sglang_shards import build_engine_shards
from parallel.shards import GeometryError


def find_trainer_problem(model: ModelGeometry, layout: Layout, fp8_roles: frozenset[str], quantized: bool = True) -> GeometryError | None:
    """Why a training layout cannot work, None where it can. `quantized` as in `build_megatron_shards`."""
    try:
        once = replace(layout, pp=1, vpp=1)
        check_block_alignment(build_trainer_shards(keep_one_layer_per_kind(model), once, quantized=quantized), fp8_roles)
    except GeometryError as error:
        return error
    return None


def find_engine_problem(model: ModelGeometry, tp: int, ep: int, fp8_roles: frozenset[str]) -> GeometryError | None:
    """Why an engine of `tp` ranks, `ep` of them expert parallel, cannot work; None where it can."""
    try:
        check_block_alignment(build_engine_shards(keep_one_layer_per_kind(model), tp, ep), fp8_roles)
    except GeometryError as error:
        return error
    return None


def find_nearest_layouts(
    model: ModelGeometry, layout: Layout, fp8_roles: frozenset[str], quantized: bool = True, count: int = 2
) -> list[Layout]:
    """The working training layouts with sizes nearest to `layout`'s, best first; on the same number of ranks where there are any."""
    width = layout.tp * layout.dp
    candidates = []
    for tp, etp, ep in _nearby(model, (layout.tp, layout.etp, layout.ep)):
        least = math.lcm(tp, etp * ep)  # ranks of one pipeline stage, context parallelism apart
        ranks = width if width % least == 0 else least
        candidates.append(replace(layout, tp=tp, etp=etp, ep=ep, dp=ranks // tp))
    candidates.sort(key=lambda one: one.world_size != layout.world_size)  # stable: keeps the order of distance
    return _working(candidates, lambda one: find_trainer_problem(model, one, fp8_roles, quantized), count)


def find_nearest_engines(model: ModelGeometry, tp: int, ep: int, fp8_roles: frozenset[str], count: int = 2) -> list[tuple[int, int]]:
    """The working (tp, ep) of an engine that are nearest to the given ones, best first."""
    candidates = [(size, experts) for size, cut, experts in _nearby(model, (tp, tp // math.gcd(tp, ep), ep)) if size == cut * experts]
    return _working(candidates, lambda one: find_engine_problem(model, *one, fp8_roles), count)


def add_layout_hints(
    error: GeometryError, model: ModelGeometry, train: Layout, rollout: tuple[int, int], fp8_roles: frozenset[str], quantized: bool = True
) -> GeometryError:
    """The same refusal, its fix led by the nearest layouts that do work; `rollout` is the engine's (tp, ep)."""
    hints = []
    if find_trainer_problem(model, train, fp8_roles, quantized):
        found = [_words(one, model) for one in find_nearest_layouts(model, train, fp8_roles, quantized)]
        hints.append(f"train layouts that work: {' or '.join(found) or 'none'}")
    if find_engine_problem(model, *rollout, fp8_roles):
        engines = [f"tp={tp}" + (f" ep={ep}" if model.experts else "") for tp, ep in find_nearest_engines(model, *rollout, fp8_roles)]
        hints.append(f"rollout layouts that work: {' or '.join(engines) or 'none'}")
    return GeometryError(error.field, error.value, error.rule, "; ".join([*hints, error.fix]) if hints else error.fix)


def keep_one_layer_per_kind(model: ModelGeometry) -> ModelGeometry:
    """The model cut down to one layer of each kind that it has."""
    if model.experts is None:
        return replace(model, layers=1)
    dense = frozenset({0}) if model.experts.dense_layers else frozenset()
    return replace(model, layers=1 + len(dense), experts=replace(model.experts, dense_layers=dense))


def _words(layout: Layout, model: ModelGeometry) -> str:
    return f"tp={layout.tp}" + (f" ep={layout.ep} etp={layout.etp}" if model.experts else "")


def _nearby(model: ModelGeometry, sizes: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """(tp, expert tp, ep) by divisors of heads, expert width and expert count, nearest to `sizes` first."""
    tps = _divisors(model.heads)
    if model.experts is None:
        found = [(tp, tp, 1) for tp in tps]
    else:
        found = [(tp, cut, ep) for tp in tps for cut in tps for ep in _divisors(model.experts.count)]

    def distance(candidate: tuple[int, int, int]) -> tuple[float, tuple[int, int, int]]:
        return sum(abs(math.log2(a / b)) for a, b in zip(candidate, sizes, strict=True)), candidate

    return sorted(found, key=distance)


def _divisors(length: int, limit: int = 64) -> list[int]:
    return [size for size in range(1, min(length, limit) + 1) if length % size == 0]


_Candidate = TypeVar("_Candidate")


def _working(candidates: Iterable[_Candidate], problem: Callable[[_Candidate], GeometryError | None], count: int) -> list[_Candidate]:
    return list(islice((one for one in candidates if problem(one) is None), count))
