"""A weight of a model, in one row: the checkpoint's tensors that it is made of, its two names, and how ranks cut it.

`parallel.megatron_shards` and `parallel.sglang_shards` read the same rows. Weights that have the same name in SGLang are one parameter
there: their parts lie one below the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from parallel.shards import HFTensor, Region, Shard, split_cols, split_rows, take_all, take_rows

Cut = Literal["whole", "rows", "cols", "qkv", "vocabulary"]
"""Over tensor-parallel ranks. whole: every rank has all of it. rows, cols: equal parts of each piece; gate and up are two pieces.
qkv: by heads, as each side has its own order. vocabulary: rows, padded."""


class Weight(NamedTuple):
    """One parameter of Megatron's."""

    pieces: tuple[Region, ...]
    """Rectangles of the checkpoint's tensors, one below the other."""
    megatron: str
    sglang: str
    """Empty where SGLang has no such parameter."""
    cut: Cut
    expert: int | None = None
    """The expert's number; Megatron's expert parallelism goes by it."""


def make_weight(tensors: HFTensor | Sequence[HFTensor], megatron: str, cut: Cut, sglang: str = "", expert: int | None = None) -> Weight:
    """Return a weight of whole tensors; SGLang's name is by default the checkpoint's."""
    tensors = [tensors] if isinstance(tensors, HFTensor) else tensors
    return Weight(tuple(map(take_all, tensors)), megatron, sglang or tensors[0].name, cut, expert)


def make_vector(name: str, length: int, megatron: str, role: str = "norm") -> Weight:
    """Return a one-dimensional weight that every rank has whole."""
    return make_weight(HFTensor(name, length, 1, role, vector=True), megatron, "whole")


def cut_weight(weight: Weight, part: int, parts: int, field: str) -> list[Region]:
    """Return what the `part`-th of `parts` ranks has of a weight whose cut both sides share. Raise GeometryError, naming `field`, where
    the ranks do not divide it."""
    if weight.cut == "whole":
        return list(weight.pieces)
    split = split_rows if weight.cut == "rows" else split_cols
    return [split(piece, part, parts, field) for piece in weight.pieces]


def cut_vocabulary(name: str, weight: Weight, padded_rows: int, part: int, parts: int) -> Shard:
    """Return rows of an embedding that has `padded_rows` over all ranks; the padding at its end belongs to no region."""
    tensor, rows = weight.pieces[0].tensor, padded_rows // parts
    first = min(part * rows, tensor.rows)
    return Shard(name, rows, tensor.cols, (take_rows(tensor, first, min(first + rows, tensor.rows) - first),))
