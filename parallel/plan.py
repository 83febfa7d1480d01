"""The reshard plan: which rectangle of which source shard fills which rectangle of which target shard.

Computed once from two lists of shards told in Hugging Face coordinates (`parallel.geometry`); used by every sync, by import and by
export. A tensor whose role is FP8 moves as whole 128x128 blocks: its bytes and, at 1/128 of the coordinates, its scales. Nothing is
quantised again, so every edge of every rectangle must lie on a block edge of source, target and checkpoint, or at a tensor's end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.blocks import BLOCK, blocks_in
from parallel.geometry import GeometryError, Piece, Rect, Shard


@dataclass(frozen=True)
class Copy:
    """Moves `source_rect` of `source` on rank `source_rank` to `target_rect` of `target` on rank `target_rank`; equal sizes.

    `tensor` names the Hugging Face tensor it belongs to. Where `fp8`, scales move along: see `blocks`.
    """

    tensor: str
    source_rank: int
    source: str
    source_rect: Rect
    target_rank: int
    target: str
    target_rect: Rect
    fp8: bool


def blocks(rect: Rect) -> Rect:
    """The rectangle of scales that belongs to a rectangle of FP8 elements."""
    return Rect(rect.row // BLOCK, rect.col // BLOCK, blocks_in(rect.rows), blocks_in(rect.cols))


def reshard(sources: Mapping[int, Sequence[Shard]], targets: Mapping[int, Sequence[Shard]], fp8_roles: frozenset[str]) -> list[Copy]:
    """The copies that fill every target piece exactly once, ordered by target rank and parameter.

    `sources` and `targets` map a rank to its shards. Where several ranks hold the same source, the one that has moved the fewest
    elements so far is taken, the target's own rank first. Raises GeometryError when a piece has no source or would cut a block.
    """
    holders = _holders(sources)
    load: dict[int, int] = defaultdict(int)
    plan: list[Copy] = []
    for target_rank, shards in targets.items():
        for shard in shards:
            for piece in shard.pieces:
                plan += _fill(piece, shard, target_rank, holders, load, fp8_roles)
    return plan


_Holder = tuple[int, Shard, Piece]


def _holders(sources: Mapping[int, Sequence[Shard]]) -> dict[str, dict[Rect, list[_Holder]]]:
    """tensor name -> rectangle of it -> who holds that rectangle."""
    found: dict[str, dict[Rect, list[_Holder]]] = defaultdict(lambda: defaultdict(list))
    for rank, shards in sources.items():
        for shard in shards:
            for piece in shard.pieces:
                found[piece.tensor.name][piece.source].append((rank, shard, piece))
    return found


def _fill(
    piece: Piece,
    shard: Shard,
    rank: int,
    holders: Mapping[str, Mapping[Rect, list[_Holder]]],
    load: dict[int, int],
    fp8_roles: frozenset[str],
) -> list[Copy]:
    """The copies for one target piece: its overlaps with the rectangles that the sources hold, which never overlap each other."""
    fp8 = piece.tensor.role in fp8_roles
    copies, missing = [], piece.source.rows * piece.source.cols
    for held, owners in holders.get(piece.tensor.name, {}).items():
        overlap = _overlap(held, piece.source)
        if overlap is None:
            continue
        source_rank, source_shard, source_piece = min(owners, key=lambda owner: (owner[0] != rank, load[owner[0]]))
        load[source_rank] += overlap.rows * overlap.cols
        missing -= overlap.rows * overlap.cols
        copy = Copy(
            tensor=piece.tensor.name,
            source_rank=source_rank,
            source=source_shard.name,
            source_rect=_within(overlap, source_piece),
            target_rank=rank,
            target=shard.name,
            target_rect=_within(overlap, piece),
            fp8=fp8,
        )
        if fp8:
            _check_blocks(copy, overlap, piece)
        copies.append(copy)
    if missing:
        raise GeometryError(piece.tensor.name, f"{missing} elements", f"no source holds what {shard.name} of rank {rank} needs")
    return copies


def _overlap(a: Rect, b: Rect) -> Rect | None:
    row, col = max(a.row, b.row), max(a.col, b.col)
    rows, cols = min(a.row + a.rows, b.row + b.rows) - row, min(a.col + a.cols, b.col + b.cols) - col
    return Rect(row, col, rows, cols) if rows > 0 and cols > 0 else None


def _within(overlap: Rect, piece: Piece) -> Rect:
    """`overlap`, told in the coordinates of the shard that holds `piece`."""
    return Rect(overlap.row - piece.source.row + piece.row, overlap.col - piece.source.col + piece.col, overlap.rows, overlap.cols)


def _check_blocks(copy: Copy, overlap: Rect, piece: Piece) -> None:
    """Every start on a block edge in all three coordinate systems; every end on one too, or at the tensor's end."""
    tensor = piece.tensor
    starts = [getattr(rect, axis) for rect in (overlap, copy.source_rect, copy.target_rect) for axis in ("row", "col")]
    ends_whole = (overlap.rows % BLOCK == 0 or overlap.row + overlap.rows == tensor.rows) and (
        overlap.cols % BLOCK == 0 or overlap.col + overlap.cols == tensor.cols
    )
    if any(start % BLOCK for start in starts) or not ends_whole:
        raise GeometryError(
            tensor.name,
            f"rows {overlap.row}..{overlap.row + overlap.rows}, columns {overlap.col}..{overlap.col + overlap.cols}",
            f"a shard boundary cuts a {BLOCK}x{BLOCK} FP8 block between {copy.source} and {copy.target}",
            "use a smaller tensor-parallel size, or precision.mode = bf16",
        )


@dataclass(frozen=True)
class Move:
    """A copy of one plane: a named two-dimensional tensor of raw values. An FP8 `Copy` is two moves, its bytes and its scales."""

    source_rank: int
    source: str
    source_rect: Rect
    target_rank: int
    target: str
    target_rect: Rect
    kind: str
    """`fp8`, `scale` or `high`: decides the bytes per element."""


def scale_name(weight: str) -> str:
    """Name of the scales of an FP8 weight, as in SGLang and in FP8 checkpoints: x.weight -> x.weight_scale_inv."""
    return weight + "_scale_inv"


def moves(plan: Sequence[Copy]) -> list[Move]:
    """The plan told plane by plane."""
    found = []
    for copy in plan:
        found.append(
            Move(
                copy.source_rank,
                copy.source,
                copy.source_rect,
                copy.target_rank,
                copy.target,
                copy.target_rect,
                "fp8" if copy.fp8 else "high",
            )
        )
        if copy.fp8:
            source, target = scale_name(copy.source), scale_name(copy.target)
            found.append(
                Move(copy.source_rank, source, blocks(copy.source_rect), copy.target_rank, target, blocks(copy.target_rect), "scale")
            )
    return found
