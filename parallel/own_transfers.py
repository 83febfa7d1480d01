"""What one trainer rank sends in a sync, found from its own shards. The result is the rank's share of `parallel.reshard.reshard` over all
ranks, but the cost does not grow with the ranks: only the layers that the rank holds are looked up in one engine, and of the engines that a
group of replicas serves, only those whose turn it is. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from parallel.chunking import Cuts, Extent, cut_extents
from parallel.formats import FormatOf
from parallel.layout import EngineLayout, Layout, list_stage_layers
from parallel.megatron_shards import build_held_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer, add_scale_transfers, check_block_alignment, get_scale_rect, intersect
from parallel.sglang_shards import build_part, check_sizes
from parallel.shards import Rect, Region, Shard, no_garbage_collection


class Want(NamedTuple):
    """A region of a shard of every engine's rank `rank`. `place`: of part, shard and region in the rank's order."""

    rank: int
    place: tuple[int, int, int]
    shard: Shard
    region: Region


class Job(NamedTuple):
    """Equally large rectangles of one region of the rank's own, which every engine needs."""

    nbytes: int
    order: int  # of the region among the rank's own
    shard: Shard
    region: Region
    wants: list[tuple[Want, Rect]]


@no_garbage_collection()
def plan_own_transfers(model: ModelGeometry, train: Layout, rollout: EngineLayout, format_of: FormatOf, rank: int) -> list[Transfer]:
    """Return the transfers of trainer rank `rank`, scales included, ordered by engine rank and parameter. Raise GeometryError if a shard of
    its layers cuts a block, or for sizes that do not fit the model."""
    check_sizes(model, rollout.tp, rollout.ep)
    held = build_held_shards(model, train, rank, format_of=format_of)
    parts = {
        part: [build_part(model, rollout.tp, each, rollout.ep, part) for each in range(rollout.tp)]
        for part in list_own_parts(model, train, rank)
    }
    for side in ([shard for shard, _ in held], *(shards for ranks in parts.values() for shards in ranks)):
        check_block_alignment({rank: side}, format_of)
    found: list[tuple[int, tuple[int, int, int], int, Transfer]] = []
    names = {region.tensor.name for shard, _ in held for region in shard.regions}
    for holders, jobs in _list_jobs(held, _list_wants(parts, names), format_of).items():
        found += _take_turns(jobs, holders, rollout, format_of, rank)
    found.sort(key=lambda entry: entry[:3])
    return add_scale_transfers([transfer for *_, transfer in found])


def list_own_parts(model: ModelGeometry, train: Layout, rank: int) -> list[int]:
    """Return the parts (`sglang_shards.build_part`) that hold tensors of a trainer rank."""
    stage = train.coordinates(rank).pp
    ends = [0, model.layers + 1] if stage in (0, train.pp - 1) else []
    return sorted([*ends, *(1 + layer for layer in list_stage_layers(model.layers, train, stage))])


@no_garbage_collection()
def list_all_jobs(model: ModelGeometry, train: Layout, rollout: EngineLayout, format_of: FormatOf) -> dict[tuple[int, ...], list[Job]]:
    """Return the jobs of all trainer ranks by the ranks that take turns (`reshard`), in their order. Raise as `plan_own_transfers` does."""
    check_sizes(model, rollout.tp, rollout.ep)
    parts = {
        part: [build_part(model, rollout.tp, rank, rollout.ep, part) for rank in range(rollout.tp)] for part in range(model.layers + 2)
    }
    for of_ranks in parts.values():
        check_block_alignment(dict(enumerate(of_ranks)), format_of)
    wants, jobs, first = _list_wants(parts), dict[tuple[int, ...], list[Job]](), dict[tuple[int, ...], int]()
    for rank, at in enumerate(map(train.coordinates, range(train.world_size))):
        first.setdefault((at.pp, at.tp, at.ep, at.etp), rank)
    for rank in first.values():
        held = [(shard, holders) for shard, holders in build_held_shards(model, train, rank, format_of=format_of) if holders not in jobs]
        check_block_alignment({rank: [shard for shard, _ in held]}, format_of)
        jobs |= _list_jobs(held, wants, format_of)
    return jobs


def _list_wants(parts: dict[int, list[tuple[Shard, ...]]], names: Container[str] | None = None) -> dict[str, list[Want]]:
    """Return what every engine wants of these checkpoint tensors, or of all, by the tensor's name."""
    wants: dict[str, list[Want]] = defaultdict(list)
    for part, ranks in parts.items():
        for rank, shards in enumerate(ranks):
            for number, shard in enumerate(shards):
                for index, region in enumerate(shard.regions):
                    if names is None or region.tensor.name in names:
                        wants[region.tensor.name].append(Want(rank, (part, number, index), shard, region))
    return wants


def _list_jobs(
    held: Sequence[tuple[Shard, tuple[int, ...]]], wants: dict[str, list[Want]], format_of: FormatOf
) -> dict[tuple[int, ...], list[Job]]:
    """Return all jobs by the ranks that share them, large ones first."""
    jobs: dict[tuple[int, ...], list[Job]] = defaultdict(list)
    own = [(shard, holders, region) for shard, holders in held for region in shard.regions]
    for order, (shard, holders, region) in enumerate(own):
        by_size: dict[int, list[tuple[Want, Rect]]] = defaultdict(list)
        for want in sorted(wants.get(region.tensor.name, ()), key=lambda want: want[:2]):
            if rect := intersect(region.tensor_rect, want.region.tensor_rect):
                by_size[rect.rows * rect.cols * format_of(want.shard.role).element_bytes].append((want, rect))
        jobs[holders] += [Job(nbytes, order, shard, region, each) for nbytes, each in by_size.items()]
    return {holders: sorted(each, key=lambda job: (-job.nbytes, job.order)) for holders, each in jobs.items()}


def _take_turns(
    jobs: Sequence[Job], holders: tuple[int, ...], rollout: EngineLayout, format_of: FormatOf, rank: int
) -> Iterator[tuple[int, tuple[int, int, int], int, Transfer]]:
    """Yield the transfers of `rank`, with what orders them, as `reshard` shares them among the holders."""
    turn, place = 0, holders.index(rank)
    for job in jobs:
        away = _list_away(holders, rollout, tuple(want.rank for want, _ in job.wants))
        own = [*away[(place - turn) % len(holders) :: len(holders)]]
        turn += len(away)
        if rank < rollout.engines * rollout.tp:  # the engine rank on the same device
            own += [(rank, index) for index, (want, _) in enumerate(job.wants) if want.rank == rank % rollout.tp]
        for target, index in own:
            want, rect = job.wants[index]
            source, fills = _move(rect, job.region), _move(rect, want.region)
            format = format_of(want.shard.role)
            transfer = Transfer(rank, job.shard.name, source, target, want.shard.name, fills, format, job.region.tensor.name)
            yield target, want.place, job.order, transfer


@lru_cache(maxsize=4096)
def _list_away(holders: tuple[int, ...], rollout: EngineLayout, ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (engine rank, index in `ranks`) of all engines for engine ranks that share no device with a holder."""
    at_home = frozenset(holders)
    numbered = ((engine * rollout.tp + rank, index) for engine in range(rollout.engines) for index, rank in enumerate(ranks))
    return [(target, index) for target, index in numbered if target not in at_home]


def _move(rect: Rect, region: Region) -> Rect:
    """Return a rectangle of a checkpoint tensor in the coordinates of a region's shard."""
    row, col = rect.row - region.tensor_rect.row + region.shard_row, rect.col - region.tensor_rect.col + region.shard_col
    return Rect(row, col, rect.rows, rect.cols)


def make_cuts(
    model: ModelGeometry, rollout: EngineLayout, format_of: FormatOf, limit: int, parts: Sequence[int], keep: Callable[[str], bool]
) -> Callable[[int], Cuts]:
    """Return a function that returns where the tensors in `parts` of an engine rank are cut into buffers of `limit` bytes, computed from
    the sizes of one layer of each kind. `keep`: which tensors share the buffers, by name."""
    sizes: dict[tuple[int, object], list[Extent]] = {}

    @cache
    def cut(rank: int) -> Cuts:
        extents: list[Extent] = []
        for part in range(model.layers + 2):
            kind = rank, model.layer_kind(part - 1) if 0 < part <= model.layers else part
            if part in own or kind not in sizes:
                shards = build_part(model, rollout.tp, rank, rollout.ep, part)
                sizes[kind] = _list_extents((shard for shard in shards if keep(shard.name)), format_of)
            extents += sizes[kind] if part in own else [extent._replace(name="") for extent in sizes[kind]]
        return cut_extents(extents, limit)

    own = frozenset(parts)
    return lambda target: cut(target % rollout.tp)


def _list_extents(shards: Iterable[Shard], format_of: FormatOf) -> list[Extent]:
    extents = []
    for shard in shards:
        format, rects = format_of(shard.role), [region.shard_rect for region in shard.regions if region.tensor_rect.rows]
        if rects:
            extents.append(Extent.around(shard.name, format.element_bytes, rects))
            if format.quantized:
                scales = [get_scale_rect(rect, format) for rect in rects]
                extents.append(Extent.around(format.scale_name(shard.name), format.scale.element_bytes, scales))
    return extents
