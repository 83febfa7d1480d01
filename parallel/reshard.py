"""The reshard plan: which rectangle of which source shard fills which rectangle of which target shard.

Computed once from two lists of shards in Hugging Face coordinates (`parallel.shards`); used by every sync, by import and by export.
A tensor whose role is FP8 moves as whole 128x128 blocks: its bytes and, at 1/128 of the coordinates, its scales. Nothing is quantised
again, so every edge of every region must lie on a block edge of its shard and of the checkpoint, or at a tensor's end. An INT8 tensor
has a scale per row, of the whole row wherever the row is cut, so it may be cut anywhere.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from parallel.formats import BLOCK, SCHEMES
from parallel.shards import FP32_ROLES, GeometryError, Rect, Region, Shard, find_misaligned_region


class Transfer(NamedTuple):
    """`source_rect` of `source` on rank `source_rank` fills `target_rect`, of equal size, of `target` on rank `target_rank`."""

    source_rank: int
    source: str
    source_rect: Rect
    target_rank: int
    target: str
    target_rect: Rect
    kind: str
    """`fp8`, `int8`, `scale`, `high` (the run's high-precision dtype) or `fp32`: decides the dtype, see `parallel.formats`."""
    tensor: str = ""
    """The Hugging Face tensor whose values move; scales belong to their weight's."""


def reshard(
    sources: Mapping[int, Sequence[Shard]],
    targets: Mapping[int, Sequence[Shard]],
    fp8_roles: frozenset[str],
    homes: Mapping[int, int] | None = None,
    int8_roles: frozenset[str] = frozenset(),
) -> list[Transfer]:
    """Return the transfers that fill every target region exactly once, ordered by target rank and parameter, without scales.

    `sources` and `targets` map a rank to its shards. Where several sources hold the same elements, the one on the target's own device
    is chosen; else one that sends few bytes to other devices. `homes` maps a target rank to the source rank on its device, by default
    the one of the same number; empty where engines have devices of their own. `add_scale_transfers` adds the scales.

    Raises GeometryError when a region has no source or cuts an FP8 block.
    """
    for side in (sources, targets):
        check_block_alignment(side, fp8_roles)
    with _no_garbage_collection():
        owners = _Owners(sources)
        parts = []
        for rank, shards in targets.items():
            home = rank if homes is None else homes.get(rank, -1)
            for shard in shards:
                for region in shard.regions:
                    parts += [_Part(rank, home, shard, region, *cover) for cover in owners.cover(region, home, shard.name, rank)]
        kinds = [kind_of(part.shard.role, fp8_roles, int8_roles) for part in parts]
        return [_make_transfer(part, owner, kind) for part, owner, kind in zip(parts, _choose_owners(parts, kinds), kinds, strict=True)]


def add_scale_transfers(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Return the transfers with those of scales: one after each FP8 transfer, and one for all INT8 transfers that fill the same rows of
    a target, after the one that starts at its first column."""
    result = []
    scale_names: dict[str, str] = {}  # every name once in memory
    with _no_garbage_collection():
        for transfer in transfers:
            result.append(transfer)
            kind, target_rect = transfer.kind, transfer.target_rect
            scheme = SCHEMES.get(kind)
            if scheme is not None and not (scheme.whole_rows and target_rect.col):
                source, target = (
                    scale_names.get(name) or scale_names.setdefault(name, scale_name(name, kind))
                    for name in (transfer.source, transfer.target)
                )
                source_rect, target_rect = get_scale_rect(transfer.source_rect, kind), get_scale_rect(target_rect, kind)
                result.append(
                    Transfer(transfer.source_rank, source, source_rect, transfer.target_rank, target, target_rect, "scale", transfer.tensor)
                )
    return result


def kind_of(role: str, fp8_roles: frozenset[str], int8_roles: frozenset[str] = frozenset()) -> str:
    """Return the kind of a role's data: `fp8`, `int8`, `fp32` or `high`."""
    if role in fp8_roles:
        return "fp8"
    return "int8" if role in int8_roles else "fp32" if role in FP32_ROLES else "high"


def scale_name(weight: str, kind: str = "fp8") -> str:
    """Return the name of a quantised weight's scales, as in SGLang and in checkpoints: x.weight -> x.weight_scale_inv."""
    return weight + SCHEMES[kind].scale_suffix


def get_scale_rect(rect: Rect, kind: str = "fp8") -> Rect:
    """Return the rectangle of scales that belongs to a rectangle of quantised elements."""
    scheme = SCHEMES[kind]
    return Rect(rect.row // scheme.rows, 0 if scheme.whole_rows else rect.col // scheme.cols, *scheme.grid(rect.rows, rect.cols))


def list_stored_tensors(
    shards: Iterable[Shard], fp8_roles: frozenset[str], int8_roles: frozenset[str] = frozenset()
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> (kind, shape) of the tensors that store some shards; a quantised one is stored as its bytes and its scales."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for shard in shards:
        kind = kind_of(shard.role, fp8_roles, int8_roles)
        tensors[shard.name] = kind, shard.shape
        if kind in SCHEMES:
            tensors[scale_name(shard.name, kind)] = "scale", shard.scale_shape(kind)
    return tensors


def check_block_alignment(side: Mapping[int, Sequence[Shard]], fp8_roles: frozenset[str]) -> None:
    """Raise GeometryError for the first FP8 shard that cuts a block of the checkpoint, or of itself."""
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


class _Owner(NamedTuple):
    """A source shard that holds a rectangle of a checkpoint's tensor."""

    rank: int
    name: str
    row_offset: int
    """Added to a row of the checkpoint's tensor gives the row of the shard; columns likewise."""
    col_offset: int


_RectOwners = tuple[Rect, dict[int, _Owner]]
"""A rectangle of a checkpoint's tensor, and by rank the source shards that hold it."""


class _Part(NamedTuple):
    """A rectangle of a checkpoint's tensor that a target shard needs, and the source shards that hold it."""

    rank: int
    home: int
    shard: Shard
    region: Region
    rect: Rect
    owners: dict[int, _Owner]


def _choose_owners(parts: Sequence[_Part], kinds: Sequence[str]) -> list[_Owner]:
    """Choose a source for every part. Those with few owners come first, and large before small, so that loads even out."""
    sizes = [part.rect.rows * part.rect.cols * (1 if kind in SCHEMES else 2) for part, kind in zip(parts, kinds, strict=True)]
    chosen: list[_Owner | None] = [part.owners.get(part.home) for part in parts]
    sent: dict[int, int] = defaultdict(int)
    for index in sorted(range(len(parts)), key=lambda index: (len(parts[index].owners), -sizes[index])):
        if chosen[index] is None:
            owners = parts[index].owners
            source_rank = min(owners, key=sent.__getitem__)
            sent[source_rank] += sizes[index]
            chosen[index] = owners[source_rank]
    return cast(list[_Owner], chosen)


def _make_transfer(part: _Part, owner: _Owner, kind: str) -> Transfer:
    rank, _, shard, region, (row, col, rows, cols), _ = part
    source_rect = Rect(row + owner.row_offset, col + owner.col_offset, rows, cols)
    target_rect = Rect(row - region.tensor_rect.row + region.shard_row, col - region.tensor_rect.col + region.shard_col, rows, cols)
    return Transfer(owner.rank, owner.name, source_rect, rank, shard.name, target_rect, kind, region.tensor.name)


class _Owners:
    """Which source shards hold which rectangles of which tensors."""

    def __init__(self, sources: Mapping[int, Sequence[Shard]]) -> None:
        self._by_tensor: dict[str, dict[Rect, dict[int, _Owner]]] = {}
        self._covers: dict[tuple[str, Rect], list[_RectOwners] | None] = {}
        for rank, shards in sources.items():
            for shard in shards:
                for tensor, rect, row, col in shard.regions:
                    owners = self._by_tensor.setdefault(tensor.name, {}).setdefault(rect, {})
                    owners.setdefault(rank, _Owner(rank, shard.name, row - rect.row, col - rect.col))

    def cover(self, region: Region, home: int, target: str, rank: int) -> list[_RectOwners]:
        """Return disjoint rectangles that make up a region, each with its owners. Raises GeometryError where elements have no owner."""
        name, wanted = region.tensor.name, region.tensor_rect
        if (name, wanted) not in self._covers:
            self._covers[name, wanted] = self._cover_if_disjoint(name, wanted)
        cover = self._covers[name, wanted]
        if cover is None:  # sources overlap each other: the home's own rectangles first
            cover = _cover(wanted, sorted(self._by_tensor[name].items(), key=lambda rect_owners: home not in rect_owners[1]))
        missing = wanted.rows * wanted.cols - _count_elements(cover)
        if missing:
            raise GeometryError(name, f"{missing} elements", f"no source holds what {target} of rank {rank} needs")
        return cover

    def _cover_if_disjoint(self, name: str, wanted: Rect) -> list[_RectOwners] | None:
        """Return the parts of `wanted` that sources hold; None where sources overlap, as the choice then depends on the target's home."""
        available = list(self._by_tensor.get(name, {}).items())
        overlaps = [(overlap, owners) for rect, owners in available if (overlap := _overlap(rect, wanted))]
        cover = _cover(wanted, available)
        return cover if _count_elements(cover) == _count_elements(overlaps) else None


def _count_elements(rects: Iterable[_RectOwners]) -> int:
    return sum(rect.rows * rect.cols for rect, _ in rects)


def _cover(wanted: Rect, available: Sequence[_RectOwners]) -> list[_RectOwners]:
    """Cover `wanted` with the available rectangles, in order, none of it twice; elements that none of them holds stay uncovered."""
    cover, uncovered = [], [wanted] if wanted.rows and wanted.cols else []
    for rect, owners in available:
        remaining: list[Rect] = []
        for part in uncovered:
            overlap = _overlap(rect, part)
            if overlap is None:
                remaining.append(part)
            else:
                cover.append((overlap, owners))
                remaining += _subtract(part, overlap)
        uncovered = remaining
        if not uncovered:
            break
    return cover


def _overlap(a: Rect, b: Rect) -> Rect | None:
    row, col = max(a.row, b.row), max(a.col, b.col)
    rows, cols = min(a.row + a.rows, b.row + b.rows) - row, min(a.col + a.cols, b.col + b.cols) - col
    return Rect(row, col, rows, cols) if rows > 0 and cols > 0 else None


def _subtract(rect: Rect, hole: Rect) -> list[Rect]:
    """Return the rectangles around a hole in a rectangle: above, below, left and right of it."""
    below, right = hole.row + hole.rows, hole.col + hole.cols
    parts = [
        Rect(rect.row, rect.col, hole.row - rect.row, rect.cols),
        Rect(below, rect.col, rect.row + rect.rows - below, rect.cols),
        Rect(hole.row, rect.col, hole.rows, hole.col - rect.col),
        Rect(hole.row, right, hole.rows, rect.col + rect.cols - right),
    ]
    return [part for part in parts if part.rows and part.cols]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn off Python's cycle collector, which would look at a big plan's millions of tuples again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
