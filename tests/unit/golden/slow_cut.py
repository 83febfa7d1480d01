"""Models of random small widths as numpy arrays, and shards cut from them element by element: what a plan's moves must produce."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from parallel.blocks import BLOCK
from parallel.geometry import ModelGeometry, Shard
from parallel.layout import Layout
from parallel.plan import Move, scale_name

ROLES = frozenset({"attention_qkv", "attention_output", "mlp_in", "mlp_out"})
Planes = dict[str, np.ndarray]
"""Name -> two-dimensional array of raw values: bytes of FP8 weights (uint8), scales (float32), anything else (uint16)."""


@dataclass(frozen=True)
class Case:
    """A model, how the trainer cuts it, and how the engine does."""

    model: ModelGeometry
    train: Layout
    rollout_tp: int


@st.composite
def cases(draw: st.DrawFn, pp: int = 2, dp: int = 2) -> Case:
    """Widths that are multiples of 128 wherever FP8 blocks are, and layouts that divide them."""
    kv_heads, per_kv = draw(st.sampled_from([(1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2)]))
    train_tp = draw(st.sampled_from([tp for tp in (1, 2, 4) if kv_heads % tp == 0]))
    fits = [tp for tp in (1, 2, 3, 4, 8) if kv_heads * per_kv % tp == 0 and max(kv_heads, tp) % min(kv_heads, tp) == 0]
    rollout_tp = draw(st.sampled_from(fits))
    stages = draw(st.integers(1, pp))
    model = ModelGeometry(
        layers=stages * draw(st.integers(1, 2 if stages == 1 else 1)),
        hidden=BLOCK * draw(st.integers(1, 3)),
        heads=kv_heads * per_kv,
        kv_heads=kv_heads,
        head_dim=BLOCK,
        ffn=BLOCK * math.lcm(train_tp, rollout_tp) * draw(st.integers(1, 2)),
        vocab=train_tp * draw(st.integers(2, 100)),
        tied=draw(st.booleans()),
    )
    return Case(model, Layout(tp=train_tp, pp=stages, dp=draw(st.integers(1, dp))), rollout_tp)


def checkpoint(model: ModelGeometry, seed: int = 0) -> Planes:
    """Random planes of every tensor of the checkpoint: FP8 weights quantised on the checkpoint's own grid, as bytes and scales."""
    random = np.random.default_rng(seed)
    planes: Planes = {}
    for tensor in model.tensors().values():
        if tensor.role in ROLES:
            planes[tensor.name] = random.integers(0, 256, (tensor.rows, tensor.cols), dtype=np.uint8)
            grid = (-(-tensor.rows // BLOCK), -(-tensor.cols // BLOCK))
            planes[scale_name(tensor.name)] = np.exp2(random.permutation(math.prod(grid)) - 12.0).reshape(grid).astype(np.float32)
        else:
            planes[tensor.name] = random.integers(0, 2**16, (tensor.rows, tensor.cols), dtype=np.uint16)
    return planes


def cut(shards: Sequence[Shard], source: Planes) -> Planes:
    """The planes of some shards. A scale is spread over the elements of its block first and cut with them, so that a shard whose
    blocks do not coincide with the checkpoint's is noticed."""
    planes: Planes = {}
    for shard in shards:
        planes[shard.name] = _laid(shard, source)
        if shard.role in ROLES:
            spread = {
                piece.tensor.name: np.kron(source[scale_name(piece.tensor.name)], np.ones((BLOCK, BLOCK), np.float32))
                for piece in shard.pieces
            }
            elements = _laid(shard, spread)
            scales = elements[::BLOCK, ::BLOCK]
            assert (np.kron(scales, np.ones((BLOCK, BLOCK)))[: shard.rows, : shard.cols] == elements).all(), f"{shard.name} cuts a block"
            planes[scale_name(shard.name)] = scales
    return planes


def _laid(shard: Shard, source: Planes) -> np.ndarray:
    result = np.zeros((shard.rows, shard.cols), source[shard.pieces[0].tensor.name].dtype)
    for piece in shard.pieces:
        rect = piece.source
        values = source[piece.tensor.name][rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
        result[piece.row : piece.row + rect.rows, piece.col : piece.col + rect.cols] = values
    return result


def cut_all(shards: Mapping[int, Sequence[Shard]], source: Planes) -> dict[int, Planes]:
    return {rank: cut(held, source) for rank, held in shards.items()}


def carry_out(
    moves: Sequence[Move], sources: Mapping[int, Planes], targets: Mapping[int, Planes]
) -> tuple[dict[int, Planes], dict[int, Planes]]:
    """Runs moves into fresh arrays shaped like `targets`; returns them and how often each element was written."""
    filled = {rank: {name: np.zeros_like(plane) for name, plane in planes.items()} for rank, planes in targets.items()}
    written = {rank: {name: np.zeros(plane.shape, np.int64) for name, plane in planes.items()} for rank, planes in targets.items()}
    for move in moves:
        a, b = move.source_rect, move.target_rect
        values = sources[move.source_rank][move.source][a.row : a.row + a.rows, a.col : a.col + a.cols]
        window = np.s_[b.row : b.row + b.rows, b.col : b.col + b.cols]
        assert filled[move.target_rank][move.target][window].shape == values.shape == (b.rows, b.cols), move
        filled[move.target_rank][move.target][window] = values
        written[move.target_rank][move.target][window] += 1
    return filled, written


def assert_same(got: Mapping[int, Planes], expected: Mapping[int, Planes]) -> None:
    for rank, planes in expected.items():
        assert got[rank].keys() == planes.keys()
        for name, plane in planes.items():
            assert got[rank][name].dtype == plane.dtype
            assert np.array_equal(got[rank][name], plane), f"rank {rank}: {name} differs"
