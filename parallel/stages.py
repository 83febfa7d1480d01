"""Assigns layers to pipeline stages, as Megatron-Core does.

The layout may set the sizes of the first and the last stage; the other stages share the remaining layers equally. Virtual stages cut each
stage's layers into equal parts, in rounds: part 0 of every stage, then part 1 of every stage.
"""

from __future__ import annotations

import math
from functools import lru_cache

from parallel.layout import Layout
from parallel.shards import GeometryError


def list_stage_layers(layers: int, layout: Layout, stage: int) -> list[int]:
    """Return the global numbers of a pipeline stage's layers."""
    parts = [size // layout.vpp for size in count_stage_layers(layers, layout)]
    starts = [part * sum(parts) + sum(parts[:stage]) for part in range(layout.vpp)]
    return [layer for start in starts for layer in range(start, start + parts[stage])]


def count_stage_layers(layers: int, layout: Layout) -> list[int]:
    first, last = layout.first_stage_layers, layout.last_stage_layers
    share = (layers - first - last) // _count_equal_stages(layout)
    middle = [share] * (layout.pp - 2)
    return [first or share, *middle, last or share] if layout.pp > 1 else [share]


def check_stages(layers: int, layout: Layout) -> None:
    """Raise GeometryError if stages without a given size, or the virtual stages of any stage, cannot have equally many layers."""
    given = {name: size for name in ("first_stage_layers", "last_stage_layers") if (size := getattr(layout, name))}
    rest, equal = layers - sum(given.values()), _count_equal_stages(layout)
    if rest % equal or rest <= 0:
        hint = _suggest(layers, layout)
        if not given:
            rule, fix = f"must divide num_hidden_layers ({layers})", f"use a divisor of {layers}"
            raise GeometryError("train.layout.pp", layout.pp, rule, f"{fix}, or {hint}" if hint else fix)
        (name, size), *others = given.items()
        beside = "".join(f" with train.layout.{other} = {count}" for other, count in others)
        rule = f"leaves {rest} of {layers} layers{beside}, which {equal} other stage{'s' * (equal > 1)} cannot share equally"
        raise GeometryError(f"train.layout.{name}", size, rule, f"use {hint}")
    for size in count_stage_layers(layers, layout):
        if size % layout.vpp:
            rule = f"must divide the layers of a pipeline stage ({size})"
            raise GeometryError("train.layout.vpp", layout.vpp, rule, f"use a divisor of {size}")


@lru_cache(maxsize=4096)
def balance_stages(layers: int, pp: int, vpp: int = 1, output_layer: float = 1.0) -> tuple[int, int] | None:
    """Return the `first_stage_layers` and `last_stage_layers` that minimize the slowest stage's time, or None if there are none.

    The last stage also computes the output layer, which takes as long as `output_layer` layers. Ties are broken in favor of equal stages,
    then of a small first stage, which holds the embedding and the most activations.
    """
    if pp == 1:
        return (0, 0) if vpp == 1 else None
    fewest = -(-layers // (pp * vpp)) * vpp  # smallest possible size of the largest stage
    splits = [
        (max(share, last + output_layer), share, first, last)
        for share in range(fewest, fewest + math.ceil(output_layer) + 1, vpp)
        for last in range(vpp, share + 1, vpp)
        if 0 < (first := layers - share * (pp - 2) - last) <= share and first % vpp == 0
    ]
    if not splits:
        return None
    _, share, first, last = min(splits)
    return 0 if first == share else first, 0 if last == share else last


def _count_equal_stages(layout: Layout) -> int:
    """Return the number of stages without a given size."""
    return layout.pp - (layout.first_stage_layers > 0) - (layout.last_stage_layers > 0)


def _suggest(layers: int, layout: Layout) -> str:
    """Return working settings to use instead of the given ones, or "" if there are none."""
    sizes = zip(("first_stage_layers", "last_stage_layers"), balance_stages(layers, layout.pp, layout.vpp) or (0, 0), strict=True)
    return " and ".join(f"train.layout.{name} = {size}" for name, size in sizes if size or getattr(layout, name))
