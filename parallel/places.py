"""Whether the rectangles that a sync pairs hold the same values by name. Both sides hash what a plan pairs, so two sources of equal shape
that are exchanged are equal bytes. No torch."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from parallel.chunking import Chunk
from parallel.formats import FormatOf
from parallel.reshard import get_scale_rect
from parallel.shards import NamedRect, Rect, Shard

_LAYER, _EXPERT = re.compile(r"\blayers\.(\d+)\."), re.compile(r"\bexperts\.(\d+)\.")
_ORDER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")
"""Tensors of the checkpoint in the order in which SGLang stacks them in one parameter."""


class _Stored(NamedTuple):
    """The regions of a stored tensor in the order of their rows: name in the checkpoint, place there, and place in the tensor."""

    rows: list[int]
    regions: list[tuple[str, Rect, Rect]]


def check_places(
    chunks: Iterable[Chunk], sources: Mapping[int, Sequence[Shard]], targets: Mapping[int, Sequence[Shard]], format_of: FormatOf
) -> None:
    """Raise ValueError for the first rectangle of a chunk that fills the place of another tensor, or of other rows or columns of it, and
    for an engine's parameter that stacks tensors in another order than their names say. `sources` and `targets`: shards of trainer and
    engine ranks."""
    known: dict[tuple[bool, int], dict[str, _Stored]] = {}

    def find(of_engine: bool, rank: int, named_rect: NamedRect) -> tuple[str, int, int]:
        shards = (targets if of_engine else sources)[rank]
        key = of_engine, id(shards)  # engines share their shards
        if key not in known:
            known[key] = _index(shards, format_of)
            names = {region.tensor.name for shard in shards for region in shard.regions}
            for shard in shards if of_engine else ():
                _check_names(shard, names)
        return _find(known[key], named_rect)

    for chunk in chunks:
        for source, target in zip(chunk.sources, chunk.targets, strict=True):
            sent, wanted = find(False, chunk.source, source), find(True, chunk.target, target)
            if sent != wanted:
                line = "{} at row {}, column {}"
                raise ValueError(f"{target[0]} of engine rank {chunk.target} would get {line.format(*sent)}, not {line.format(*wanted)}")


def _index(shards: Sequence[Shard], format_of: FormatOf) -> dict[str, _Stored]:
    stored = {}
    for shard in shards:
        format, regions = format_of(shard.role), sorted(shard.regions, key=lambda region: (region.shard_row, region.shard_col))
        places = [(region.tensor.name, region.tensor_rect, region.shard_rect) for region in regions]
        stored[shard.name] = _Stored([own.row for *_, own in places], places)
        if format.quantized:
            scaled = [(name, get_scale_rect(there, format), get_scale_rect(own, format)) for name, there, own in places]
            stored[format.scale_name(shard.name)] = _Stored([own.row for *_, own in scaled], scaled)
    return stored


def _find(stored: Mapping[str, _Stored], named_rect: NamedRect) -> tuple[str, int, int]:
    """Return the tensor of the checkpoint, row, and column of a rectangle's first element. Raise ValueError if it is in no region."""
    name, rect = named_rect
    rows, regions = stored[name]
    for tensor, there, own in reversed(regions[: bisect_right(rows, rect.row)]):
        if rect.row + rect.rows <= own.row + own.rows and own.col <= rect.col and rect.col + rect.cols <= own.col + own.cols:
            return tensor, there.row + rect.row - own.row, there.col + rect.col - own.col
    raise ValueError(f"rows {rect.row}..{rect.row + rect.rows - 1} of {name} are no part of one tensor of the checkpoint")


def _check_names(shard: Shard, tensors: Set[str]) -> None:
    """Raise ValueError if an engine's parameter has the name of one of `tensors` but holds another, holds another layer's tensor, or stacks
    tensors in another order than their names say."""
    names = [region.tensor.name for region in sorted(shard.regions, key=lambda region: (region.shard_row, region.shard_col))]
    of_others = (_LAYER.findall(name) != _LAYER.findall(shard.name) or (shard.name in tensors and name != shard.name) for name in names)
    wrong = next((name for name, is_wrong in zip(names, of_others, strict=True) if is_wrong), "")
    order = [([int(number) for number in _EXPERT.findall(name)], _rank(name)) for name in names]
    wrong = wrong or next((name for name, one, other in zip(names, order, order[1:], strict=False) if one > other), "")
    if wrong:
        raise ValueError(f"{shard.name} of an engine would hold {wrong} in the place of another tensor")


def _rank(name: str) -> int:
    """Return the place of a tensor among those that are stacked with it, or 0."""
    return next((stack.index(part) for stack in _ORDER for part in name.split(".") if part in stack), 0)
