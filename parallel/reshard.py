"""The reshard plan: which rectangle of which source shard fills which rectangle of which target shard. It is computed once from two lists
of shards (`parallel.shards`), and used by every sync, by import and by export. A quantized tensor moves as whole blocks: its bytes and its
scales, for FP8 at 1/128 of the coordinates. Nothing is requantized, so every edge of every region must lie on a block edge of its shard and
of the checkpoint, or at a tensor's end. INT8 has one scale per row, so a row may be cut anywhere."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from parallel.formats import SCALE, FormatOf, TensorFormat
from parallel.shards import GeometryError, Rect, Region, Shard, find_misaligned_region, no_garbage_collection


class Transfer(NamedTuple):
    """`source_rect` of `source` on rank `source_rank` fills `target_rect`, which has the same size, of `target` on rank `target_rank`."""

    source_rank: int
    source: str
    source_rect: Rect
    target_rank: int
    target: str
    target_rect: Rect
    format: TensorFormat
    tensor: str = ""  # Hugging Face tensor whose values move; for scales, the tensor of their weight

    @property
    def of_scales(self) -> bool:
        return self.format.name == SCALE

    @property
    def nbytes(self) -> int:
        return self.target_rect.rows * self.target_rect.cols * self.format.element_bytes


def reshard(
    sources: Mapping[int, Sequence[Shard]],
    targets: Mapping[int, Sequence[Shard]],
    format_of: FormatOf,
    homes: Mapping[int, int] | None = None,
) -> list[Transfer]:
    """Return the transfers that fill every target region exactly once, without scales, ordered by target rank and parameter. Raise
    GeometryError if a region has no source, or cuts a block of its format. If several sources hold the same elements, the source on the
    target's own device is chosen, else they take turns. `homes` maps a target rank to the source rank on the same
    device; it defaults to equal numbers, and is empty if engines have their own devices."""
    for side in (sources, targets):
        check_block_alignment(side, format_of)
    with no_garbage_collection():
        owners = _Owners(sources)
        parts = []
        for rank, shards in targets.items():
            home = rank if homes is None else homes.get(rank, -1)
            for shard in shards:
                for region in shard.regions:
                    parts += [_Part(rank, home, shard, region, *cover) for cover in owners.cover(region, home, shard.name, rank)]
        formats = [format_of(part.shard.role) for part in parts]
        return list(map(_make_transfer, parts, _choose_owners(parts, formats, owners.order), formats))


def add_scale_transfers(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Insert a transfer of scales after each quantized transfer. If whole rows share a scale, insert it only after the transfer that starts
    at the first column of the target rows."""
    result = []
    scale_names: dict[str, str] = {}  # keeps every name only once in memory
    with no_garbage_collection():
        for transfer in transfers:
            result.append(transfer)
            rank, name, rect, target_rank, target_name, target_rect, format, tensor = transfer
            if format.block is not None and (format.block[1] or not target_rect.col):
                source, target = (
                    scale_names.get(name) or scale_names.setdefault(name, format.scale_name(name)) for name in (name, target_name)
                )
                rects = get_scale_rect(rect, format), get_scale_rect(target_rect, format)
                result.append(Transfer(rank, source, rects[0], target_rank, target, rects[1], format.scale, tensor))
    return result


def get_scale_rect(rect: Rect, format: TensorFormat) -> Rect:
    """Return the rectangle of scales that belongs to a rectangle of quantized elements."""
    assert format.block is not None
    height, width = format.block
    return Rect(rect.row // height, rect.col // width if width else 0, *format.scale_grid(rect.rows, rect.cols))


def list_stored_tensors(shards: Iterable[Shard], format_of: FormatOf) -> dict[str, tuple[TensorFormat, tuple[int, ...]]]:
    """Return {name: (format, shape)} of the tensors that store some shards. A quantized shard is stored as its bytes and its scales."""
    tensors: dict[str, tuple[TensorFormat, tuple[int, ...]]] = {}
    for shard in shards:
        format = format_of(shard.role)
        tensors[shard.name] = format, shard.shape
        if format.quantized:
            tensors[format.scale_name(shard.name)] = format.scale, shard.scale_shape(format)
    return tensors


def check_block_alignment(side: Mapping[int, Sequence[Shard]], format_of: FormatOf) -> None:
    """Raise GeometryError for the first shard that cuts a quantized block of the checkpoint, or of itself."""
    checked: set[int] = set()  # replicas share their shard objects
    for shards in side.values():
        for shard in shards:
            format = format_of(shard.role)
            if format.block is not None and id(shard) not in checked:
                checked.add(id(shard))
                region = find_misaligned_region(shard, format)
                if region is not None:
                    row, col, rows, cols = region.tensor_rect
                    block = f"{format.block[0]}x{format.block[1]} {format.name.upper()} block"
                    raise GeometryError(
                        region.tensor.name,
                        f"rows {row}..{row + rows}, columns {col}..{col + cols}",
                        f"a shard boundary cuts a {block} in {shard.name}, at its row {region.shard_row}",
                        "use a smaller tensor-parallel size, or precision.mode = bf16",
                    )


class _Owner(NamedTuple):
    """A source shard that holds a rectangle of a checkpoint tensor."""

    rank: int
    name: str
    row_offset: int  # offset from a row of the checkpoint tensor to a row of the shard; `col_offset` likewise
    col_offset: int


_RectOwners = tuple[Rect, dict[int, _Owner]]  # a rectangle of a checkpoint tensor, and the source shards that hold it, by rank


class _Part(NamedTuple):
    """A rectangle of a checkpoint tensor that a target shard needs, and the source shards that hold it."""

    rank: int
    home: int
    shard: Shard
    region: Region
    rect: Rect
    owners: dict[int, _Owner]


def _choose_owners(parts: Sequence[_Part], formats: Sequence[TensorFormat], order: Mapping[int, int]) -> list[_Owner]:
    """Choose a source for every part: the target's own device, or else the holders of the part in turn, large parts first. Parts of equal
    size are in the order of the holders' own shards, so that each holder can find its parts alone (`parallel.own_transfers`)."""
    sizes = [part.rect.rows * part.rect.cols * format.element_bytes for part, format in zip(parts, formats, strict=True)]
    chosen: list[_Owner | None] = [part.owners.get(part.home) for part in parts]
    holders: dict[int, tuple[int, ...]] = {}  # of each set of owners
    turns: dict[tuple[int, ...], int] = defaultdict(int)
    others = (index for index, owner in enumerate(chosen) if owner is None)
    for index in sorted(others, key=lambda index: (-sizes[index], order[id(parts[index].owners)])):
        owners = parts[index].owners
        ranks = holders.get(id(owners)) or holders.setdefault(id(owners), tuple(owners))
        chosen[index] = owners[ranks[turns[ranks] % len(ranks)]]
        turns[ranks] += 1
    return cast(list[_Owner], chosen)


def _make_transfer(part: _Part, owner: _Owner, format: TensorFormat) -> Transfer:
    rank, _, shard, region, (row, col, rows, cols), _ = part
    source_rect = Rect(row + owner.row_offset, col + owner.col_offset, rows, cols)
    target_rect = Rect(row - region.tensor_rect.row + region.shard_row, col - region.tensor_rect.col + region.shard_col, rows, cols)
    return Transfer(owner.rank, owner.name, source_rect, rank, shard.name, target_rect, format, region.tensor.name)


class _Owners:
    """Index of the source shards by checkpoint tensor and rectangle."""

    def __init__(self, sources: Mapping[int, Sequence[Shard]]) -> None:
        self._by_tensor: dict[str, dict[Rect, dict[int, _Owner]]] = {}
        self._covers: dict[tuple[str, Rect], list[_RectOwners] | None] = {}
        self.order: dict[int, int] = {}
        """Place of each set of owners (by its `id`) in the order in which the first of them lists its shards."""
        for rank, shards in sources.items():
            for shard in shards:
                for tensor, rect, row, col in shard.regions:
                    owners = self._by_tensor.setdefault(tensor.name, {}).setdefault(rect, {})
                    self.order.setdefault(id(owners), len(self.order))
                    owners.setdefault(rank, _Owner(rank, shard.name, row - rect.row, col - rect.col))

    def cover(self, region: Region, home: int, target: str, rank: int) -> list[_RectOwners]:
        """Return disjoint rectangles that make up a region, with their owners. Raise GeometryError if elements have no owner."""
        name, wanted = region.tensor.name, region.tensor_rect
        if (name, wanted) not in self._covers:
            self._covers[name, wanted] = self._cover_if_disjoint(name, wanted)
        cover = self._covers[name, wanted]
        if cover is None:  # sources overlap, so rectangles on the target's own device come first
            cover = _cover(wanted, sorted(self._by_tensor[name].items(), key=lambda rect_owners: home not in rect_owners[1]))
        missing = wanted.rows * wanted.cols - sum(rect.rows * rect.cols for rect, _ in cover)
        if missing:
            raise GeometryError(name, f"{missing} elements", f"no source holds what {target} of rank {rank} needs")
        return cover

    def _cover_if_disjoint(self, name: str, wanted: Rect) -> list[_RectOwners] | None:
        """Return the parts of `wanted` that sources hold, or None if sources overlap: the choice then depends on the target's home."""
        available = list(self._by_tensor.get(name, {}).items())
        overlaps = sum(overlap.rows * overlap.cols for rect, _ in available if (overlap := intersect(rect, wanted)))
        cover = _cover(wanted, available)
        return cover if sum(rect.rows * rect.cols for rect, _ in cover) == overlaps else None


def _cover(wanted: Rect, available: Sequence[_RectOwners]) -> list[_RectOwners]:
    """Cover `wanted` with the available rectangles, in order and without overlap. Elements without an owner stay uncovered."""
    cover, uncovered = [], [wanted] if wanted.rows and wanted.cols else []
    for rect, owners in available:
        covered, uncovered = cut(uncovered, rect)
        cover += [(part, owners) for part in covered]
        if not uncovered:
            break
    return cover


def cut(parts: Sequence[Rect], rect: Rect) -> tuple[list[Rect], list[Rect]]:
    """Return what lies inside and what lies outside of a rectangle, of disjoint parts."""
    inside, outside = list[Rect](), list[Rect]()
    for part in parts:
        if (overlap := intersect(rect, part)) is None:
            outside.append(part)
        else:
            inside.append(overlap)
            outside += subtract(part, overlap)
    return inside, outside


def intersect(a: Rect, b: Rect) -> Rect | None:
    row, col = max(a.row, b.row), max(a.col, b.col)
    rows, cols = min(a.row + a.rows, b.row + b.rows) - row, min(a.col + a.cols, b.col + b.cols) - col
    return Rect(row, col, rows, cols) if rows > 0 and cols > 0 else None


def subtract(rect: Rect, hole: Rect) -> list[Rect]:
    """Return the rectangles around a hole in a rectangle: above, below, left and right."""
    below, right = hole.row + hole.rows, hole.col + hole.cols
    parts = [
        Rect(rect.row, rect.col, hole.row - rect.row, rect.cols),
        Rect(below, rect.col, rect.row + rect.rows - below, rect.cols),
        Rect(hole.row, rect.col, hole.rows, hole.col - rect.col),
        Rect(hole.row, right, hole.rows, rect.col + rect.cols - right),
    ]
    return [part for part in parts if part.rows and part.cols]
