"""Parallel layouts: how ranks shard a model. No torch.

Ranks are ordered as in Megatron-Core's parallel_state ("tp-cp-ep-dp-pp"). The same ranks are numbered in two ways:

    dense    rank = tp  + TP  * (cp + CP * (dp  + DP  * pp))       attention, dense MLP, embedding, norms
    experts  rank = etp + ETP * (ep + EP * (edp + EDP * pp))       expert weights

so ETP * EP * EDP = TP * CP * DP. A rank's pipeline stage is the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from parallel.shards import GeometryError

_MAY_BE_0 = ("first_stage_layers", "last_stage_layers")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. Raises GeometryError for an invalid size, or if the expert sizes do not fit the dense sizes."""

    tp: int = 1  # tensor parallel
    pp: int = 1  # pipeline parallel
    vpp: int = 1  # virtual stages per pipeline stage; above 1 only if `pp` is above 1
    first_stage_layers: int = 0  # layers of the first pipeline stage; 0 gives it as many as the other stages (`check_stages`)
    last_stage_layers: int = 0  # layers of the last pipeline stage; 0 as above
    ep: int = 1  # expert parallel: ranks that share the experts
    etp: int = 0  # tensor parallel within an expert; 0 means `tp`, as in Megatron
    dp: int = 1  # data parallel
    cp: int = 1  # context parallel

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for name, size in vars(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < (name not in _MAY_BE_0):
                raise GeometryError(f"train.layout.{name}", size, "must be a positive integer" + ", or 0" * (name in _MAY_BE_0))
        for name, default in {"vpp": 1, "first_stage_layers": 0, "last_stage_layers": 0}.items():
            if (size := getattr(self, name)) > default and self.pp == 1:
                rule, fix = "needs more than one pipeline stage", f"set train.layout.pp above 1, or train.layout.{name} = {default}"
                raise GeometryError(f"train.layout.{name}", size, rule, fix)
        if self.pp == 2 and self.first_stage_layers and self.last_stage_layers:
            rule = "is determined by train.layout.first_stage_layers if there are two stages"
            raise GeometryError("train.layout.last_stage_layers", self.last_stage_layers, rule, "leave one out")
        stage_ranks, expert_ranks = self.world_size // self.pp, self.ep * self.etp
        if self.ep > 1 and stage_ranks % expert_ranks:
            rule = f"ep * etp = {self.ep} * {self.etp} must divide tp * cp * dp = {self.tp} * {self.cp} * {self.dp}"
            raise GeometryError("train.layout.ep", self.ep, rule, "set train.layout.etp = 1, or change train.layout.ep or train.layout.dp")
        if stage_ranks % expert_ranks:
            raise GeometryError("train.layout.etp", self.etp, f"must divide tp * cp * dp = {stage_ranks}", "use a divisor of it")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def one_stage(self) -> Layout:
        return replace(self, pp=1, vpp=1, first_stage_layers=0, last_stage_layers=0)

    @property
    def edp(self) -> int:
        """Replicas of every expert's weights in a pipeline stage."""
        return self.world_size // self.pp // (self.ep * self.etp)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`. Raise ValueError if it is outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            sizes = f"tp({self.tp}) * cp({self.cp}) * dp({self.dp}) * pp({self.pp})"
            raise ValueError(f"rank {rank} is outside {sizes} = {self.world_size}")
        stage, stage_rank = divmod(rank, self.world_size // self.pp)
        return Coordinates(
            tp=stage_rank % self.tp,
            cp=stage_rank // self.tp % self.cp,
            dp=stage_rank // (self.tp * self.cp),
            pp=stage,
            etp=stage_rank % self.etp,
            ep=stage_rank // self.etp % self.ep,
            edp=stage_rank // (self.etp * self.ep),
        )


class EngineLayout(NamedTuple):
    """Sizes of identical engines. Rank r of engine e has number e * tp + r."""

    tp: int = 1  # tensor-parallel ranks of an engine
    ep: int = 1  # expert-parallel ranks among them
    engines: int = 1
    nodes: int = 1  # nodes over which an engine's ranks are spread, in order


@dataclass(frozen=True)
class Coordinates:
    """A rank's index in each dimension of a layout. `ep`, `etp` and `edp` apply to expert weights."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0
    edp: int = 0


def format_numbers(noun: str, numbers: Sequence[int], dash: str) -> str:
    """Return "ranks 0-2, 5" for ranks or layers 0, 1, 2 and 5, and `dash` = "-"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}{dash}{run[-1]}" for run in runs)
    return f"{noun}{'s' * (len(numbers) != 1)} {text}"


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
    """Return the `first_stage_layers` and `last_stage_layers` that minimize the slowest stage's time, or None if there are none. The output
    layer counts as `output_layer` layers of the last stage. Ties are broken in favor of equal stages, then of a small first stage."""
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
