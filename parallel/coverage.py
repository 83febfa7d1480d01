"""Arithmetic on rectangles: which part of a tensor a list of rectangles leaves out. No torch.

A proof of bytes says nothing about a byte that no rectangle holds, so the rectangles that are sent and hashed must be the whole tensor
except its padding. Trainer and engine check this independently: the trainer against the shards of the plan, the engine against its live
shapes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from parallel.chunking import Chunk
from parallel.formats import FormatOf, TensorFormat
from parallel.reshard import cut
from parallel.shards import NamedRect, Rect, Shard


class Size(NamedTuple):
    """Whole tensors."""

    tensors: int
    nbytes: int


class Gaps:
    """Finds what rectangles leave out. Equal lists of rectangles, as layers and engines of one layout have them, are compared only once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Rect, tuple[Rect, ...]], Rect | None] = {}

    def find(self, whole: Rect, rects: Sequence[Rect]) -> Rect | None:
        """Return a part of `whole` that no rectangle covers, or None if they cover all of it. Raise ValueError if two of them overlap or
        one lies outside, because then the bytes of a tensor would depend on the order of writing."""
        key = whole, tuple(rects)
        if key not in self._known:
            self._known[key] = next(iter(find_gaps(*key)), None)
        return self._known[key]


def find_gaps(whole: Rect, rects: Sequence[Rect]) -> list[Rect]:
    """Return disjoint rectangles that make up the part of `whole` outside of `rects`. Raise ValueError as `Gaps.find` does."""
    gaps = [whole] if whole.rows and whole.cols else []
    for rect in sorted(rects):  # from the top to the bottom, so that few gaps are left at a time
        covered, gaps = cut(gaps, rect)
        if sum(part.rows * part.cols for part in covered) != rect.rows * rect.cols:
            raise ValueError(f"{describe(rect)} are written twice, or lie outside")
    return gaps


def describe(rect: Rect) -> str:
    return f"rows {rect.row}..{rect.row + rect.rows - 1}, columns {rect.col}..{rect.col + rect.cols - 1}"


def as_matrix(shape: Sequence[int]) -> Rect:
    """Return the rectangle of a whole tensor: N x 1 for a vector, E * R x C for stacked matrices [E, R, C]."""
    rows, cols = (*shape, 1) if len(shape) == 1 else (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape
    return Rect(0, 0, rows, cols)


def group_by_name(named_rects: Iterable[NamedRect]) -> dict[str, list[Rect]]:
    groups: dict[str, list[Rect]] = defaultdict(list)
    for name, rect in named_rects:
        groups[name].append(rect)
    return groups


def check_chunks(targets: Mapping[int, Sequence[Shard]], chunks: Iterable[Chunk], format_of: FormatOf) -> dict[int, Size]:
    """Return the size of each engine rank's tensors. Raise ValueError, naming the tensor and its rows, unless the chunks to each rank are
    all of its shards except vocabulary padding."""
    gaps, sent = Gaps(), defaultdict[int, list[NamedRect]](list)
    for chunk in chunks:
        sent[chunk.target] += chunk.targets
    return {rank: _check_rank(rank, shards, sent[rank], format_of, gaps) for rank, shards in targets.items()}


def _check_rank(rank: int, shards: Sequence[Shard], sent: Iterable[NamedRect], format_of: FormatOf, gaps: Gaps) -> Size:
    groups, tensors, nbytes = group_by_name(sent), 0, 0
    for shard in shards:
        format = format_of(shard.role)
        stored: list[tuple[str, TensorFormat, tuple[int, ...], list[Rect]]] = [(shard.name, format, shard.shape, _list_padding(shard))]
        if format.quantized:
            stored.append((format.scale_name(shard.name), format.scale, shard.scale_shape(format), []))
        for name, stored_format, shape, padding in stored:
            whole, where = as_matrix(shape), f"{name} of engine rank {rank}"
            try:
                gap = gaps.find(whole, [*groups.pop(name, ()), *padding])
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if gap is not None:
                raise ValueError(f"{where}: no chunk has {describe(gap)}")
            tensors, nbytes = tensors + 1, nbytes + whole.rows * whole.cols * stored_format.element_bytes
    if groups:
        raise ValueError(f"{next(iter(groups))} of engine rank {rank} is in no shard")
    return Size(tensors, nbytes)


def _list_padding(shard: Shard) -> list[Rect]:
    """Return the rows of a vocabulary behind its last token, which belong to no tensor of the checkpoint."""
    last = shard.regions[-1]
    rows = last.shard_row + last.tensor_rect.rows
    ends = last.tensor_rect.row + last.tensor_rect.rows == last.tensor.rows
    if shard.role not in ("embedding", "lm_head") or not ends or rows == shard.rows:
        return []
    return [Rect(rows, 0, shard.rows - rows, shard.cols)]
