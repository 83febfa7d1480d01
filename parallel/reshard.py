"""The reshard plan: which rectangle of which source shard fills which rectangle of which target shard.

Computed once from two lists of shards told in Hugging Face coordinates (`parallel.shards`); used by every sync, by import and by
export. A tensor whose role is FP8 moves as whole 128x128 blocks: its bytes and, at 1/128 of the coordinates, its scales. Nothing is
quantised again, so every edge of every region must lie on a block edge of its shard and of the checkpoint, or at a tensor's end.
An INT8 tensor has a scale per row, of the whole row wherever the row is cut, so it may be cut anywhere.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from parallel.formats import BLOCK, SCHEMES
from parallel.shards import FP32_ROLES, GeometryError, Rect, Region, Shard, find_misaligned_region


class WeightTransfer(NamedTuple):
    """Moves `source_rect` of `source` on rank `source_rank` to `target_rect` of `target` on rank `target_rank`; equal sizes.

    `tensor` names the Hugging Face tensor it belongs to. Where `kind` is quantised, scales move along: see `add_scale_transfers`.
    """

    tensor: str
    source_rank: int
    source: str
    source_rect: Rect
    target_rank: int
    target: str
    target_rect: Rect
    kind: str
    """`fp8`, `int8`, `high` (the run's high-precision dtype) or `fp32`."""

    @property
    def fp8(self) -> bool:
        return self.kind == "fp8"


def get_scale_rect(rect: Rect, kind: str = "fp8") -> Rect:
    """The rectangle of scales that belongs to a rectangle of quantised elements."""
    scheme = SCHEMES[kind]
    return Rect(rect.row // scheme.rows, 0 if scheme.whole_rows else rect.col // scheme.cols, *scheme.grid(rect.rows, rect.cols))


def reshard(
    sources: Mapping[int, Sequence[Shard]],
    targets: Mapping[int, Sequence[Shard]],
    fp8_roles: frozenset[str],
    homes: Mapping[int, int] | None = None,
    int8_roles: frozenset[str] = frozenset(),
) -> list[WeightTransfer]:
    """The copies that fill every target region exactly once, ordered by target rank and parameter.

    `sources` and `targets` map a rank to its shards. Where several sources hold the same elements, that on the target's own device is
    taken; else one that sends few bytes to other devices. `homes` maps a target rank to the source rank on its
    device, by default the one of the same number; empty where engines have devices of their own.

    Raises GeometryError when a region has no source or cuts an FP8 block.
    """
    for side in (sources, targets):
        check_block_alignment(side, fp8_roles)
    with _no_collection():
        held = _Sources(sources)
        parts = []
        for rank, shards in targets.items():
            home = rank if homes is None else homes.get(rank, -1)
            for shard in shards:
                for region in shard.regions:
                    parts += [_Part(rank, home, shard, region, *found) for found in held.cover(region, home, shard.name, rank)]
        kinds = [kind_of(part.shard.role, fp8_roles, int8_roles) for part in parts]
        return [_make_transfer(part, holder, kind) for part, holder, kind in zip(parts, _choose(parts, kinds), kinds, strict=True)]


def kind_of(role: str, fp8_roles: frozenset[str], int8_roles: frozenset[str] = frozenset()) -> str:
    """The kind of a role's data: `fp8`, `int8`, `fp32` or `high`."""
    if role in fp8_roles:
        return "fp8"
    return "int8" if role in int8_roles else "fp32" if role in FP32_ROLES else "high"


def check_block_alignment(side: Mapping[int, Sequence[Shard]], fp8_roles: frozenset[str]) -> None:
    """Raises GeometryError for the first FP8 shard that cuts a block of the checkpoint, or of itself."""
    checked: set[int] = set()  # replicas are the same objects
    for shards in side.values():
        for shard in shards:
            if shard.role in fp8_roles and id(shard) not in checked:
                checked.add(id(shard))
                region = find_misaligned_region(shard)
                if region is not None:
                    row, col, rows, cols = region.tensor_rect
                    raise GeometryError(
                        region.tensor.name,
                        f"rows {row}..{row + rows}, columns {col}..{col + cols}",
                        f"a shard boundary cuts a {BLOCK}x{BLOCK} FP8 block in {shard.name}, at its row {region.shard_row}",
                        "use a smaller tensor-parallel size, or precision.mode = bf16",
                    )


_Holder = tuple[int, str, tuple[int, int]]
"""Rank, parameter, and what to add to a row and column of the checkpoint's tensor to find them in the parameter."""


class _Part(NamedTuple):
    """A rectangle of the checkpoint's tensor that a target needs, and who holds it."""

    rank: int
    home: int
    shard: Shard
    region: Region
    rect: Rect
    owners: dict[int, _Holder]


def _choose(parts: Sequence[_Part], kinds: Sequence[str]) -> list[_Holder]:
    """A source for every part. What few ranks hold is shared out first, and large before small, so that loads even out."""
    sizes = [part.rect.rows * part.rect.cols * (1 if kind in SCHEMES else 2) for part, kind in zip(parts, kinds, strict=True)]
    chosen: list[_Holder | None] = [part.owners.get(part.home) for part in parts]
    sent: dict[int, int] = defaultdict(int)
    for index in sorted(range(len(parts)), key=lambda index: (len(parts[index].owners), -sizes[index])):
        if chosen[index] is None:
            owners = parts[index].owners
            source = min(owners, key=sent.__getitem__)
            sent[source] += sizes[index]
            chosen[index] = owners[source]
    return cast(list[_Holder], chosen)


def _make_transfer(part: _Part, holder: _Holder, kind: str) -> WeightTransfer:
    rank, _, shard, region, (row, col, rows, cols), _ = part
    source_rank, source, (down, right) = holder
    from_rect = Rect(row + down, col + right, rows, cols)
    to_rect = Rect(row - region.tensor_rect.row + region.shard_row, col - region.tensor_rect.col + region.shard_col, rows, cols)
    return WeightTransfer(region.tensor.name, source_rank, source, from_rect, rank, shard.name, to_rect, kind)


class _Sources:
    """Who holds which rectangle of which tensor."""

    def __init__(self, sources: Mapping[int, Sequence[Shard]]) -> None:
        self._held: dict[str, dict[Rect, dict[int, _Holder]]] = {}
        self._covers: dict[tuple[str, Rect], list[tuple[Rect, dict[int, _Holder]]] | None] = {}
        for rank, shards in sources.items():
            for shard in shards:
                for tensor, source, row, col in shard.regions:
                    owners = self._held.setdefault(tensor.name, {}).setdefault(source, {})
                    owners.setdefault(rank, (rank, shard.name, (row - source.row, col - source.col)))

    def cover(self, region: Region, home: int, target: str, rank: int) -> list[tuple[Rect, dict[int, _Holder]]]:
        """Rectangles that together are `region` and do not overlap, each with its owners. Raises GeometryError where some are missing."""
        name = region.tensor.name
        key = (name, region.tensor_rect)
        if key not in self._covers:
            self._covers[key] = self._disjoint(name, region.tensor_rect)
        parts = self._covers[key]
        if parts is None:  # sources overlap each other: the home's own rectangles first
            parts = _cut(region.tensor_rect, sorted(self._held[name].items(), key=lambda held: home not in held[1]))
        missing = region.tensor_rect.rows * region.tensor_rect.cols - sum(part.rows * part.cols for part, _ in parts)
        if missing:
            raise GeometryError(name, f"{missing} elements", f"no source holds what {target} of rank {rank} needs")
        return parts

    def _disjoint(self, name: str, wanted: Rect) -> list[tuple[Rect, dict[int, _Holder]]] | None:
        """The parts of `wanted` that sources hold, None where these overlap (then the choice depends on who asks)."""
        held = self._held.get(name, {})
        touching = [(part, owners) for rect, owners in held.items() if (part := _overlap(rect, wanted))]
        parts = _cut(wanted, list(held.items()))
        return parts if sum(r.rows * r.cols for r, _ in parts) == sum(r.rows * r.cols for r, _ in touching) else None


def _cut(wanted: Rect, held: Sequence[tuple[Rect, dict[int, _Holder]]]) -> list[tuple[Rect, dict[int, _Holder]]]:
    """Takes from `wanted` what each held rectangle has of it, in order, none of it twice."""
    found, left = [], [wanted] if wanted.rows and wanted.cols else []
    for rect, owners in held:
        remaining: list[Rect] = []
        for part in left:
            overlap = _overlap(rect, part)
            if overlap is None:
                remaining.append(part)
            else:
                found.append((overlap, owners))
                remaining += _without(part, overlap)
        left = remaining
        if not left:
            break
    return found


def _overlap(a: Rect, b: Rect) -> Rect | None:
    row, col = max(a.row, b.row), max(a.col, b.col)
    rows, cols = min(a.row + a.rows, b.row + b.rows) - row, min(a.col + a.cols, b.col + b.cols) - col
    return Rect(row, col, rows, cols) if rows > 0 and cols > 0 else None


def _without(rect: Rect, hole: Rect) -> list[Rect]:
    """What is left of a rectangle around a hole in it: above, below, left and right."""
    below, right = hole.row + hole.rows, hole.col + hole.cols
    parts = [
        Rect(rect.row, rect.col, hole.row - rect.row, rect.cols),
        Rect(below, rect.col, rect.row + rect.rows - below, rect.cols),
        Rect(hole.row, rect.col, hole.rows, hole.col - rect.col),
        Rect(hole.row, right, hole.rows, rect.col + rect.cols - right),
    ]
    return [part for part in parts if part.rows and part.cols]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's cycle collector, which would look at a big plan's millions of tuples again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Transfer(NamedTuple):
    """A copy of one tensor: a named two-dimensional tensor of raw values. An FP8 `WeightTransfer` is two transfers, its bytes and its
    scales; of the
    INT8 copies that fill a row of a target, the one of its first column brings the row's scale."""

    source_rank: int
    source: str
    source_rect: Rect
    target_rank: int
    target: str
    target_rect: Rect
    kind: str
    """`fp8`, `int8`, `scale`, `high` or `fp32`: decides the bytes per element."""


def scale_name(weight: str, kind: str = "fp8") -> str:
    """Name of the scales of a quantised weight, as in SGLang and in checkpoints: x.weight -> x.weight_scale_inv."""
    return weight + SCHEMES[kind].scale_suffix


def add_scale_transfers(plan: Sequence[WeightTransfer]) -> list[Transfer]:
    """The plan told tensor by tensor."""
    found = []
    scales: dict[str, str] = {}  # every name once in memory
    with _no_collection():
        for _, source_rank, source, source_rect, target_rank, target, target_rect, kind in plan:
            found.append(Transfer(source_rank, source, source_rect, target_rank, target, target_rect, kind))
            scheme = SCHEMES.get(kind)
            if scheme is not None and not (scheme.whole_rows and target_rect.col):
                from_name, to_name = (scales.get(name) or scales.setdefault(name, scale_name(name, kind)) for name in (source, target))
                scale_rects = get_scale_rect(source_rect, kind), get_scale_rect(target_rect, kind)
                found.append(Transfer(source_rank, from_name, scale_rects[0], target_rank, to_name, scale_rects[1], "scale"))
    return found
