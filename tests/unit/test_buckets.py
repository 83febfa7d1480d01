"""Buckets: bounded, complete, and with the moves cut along them the engine still gets the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from golden import slow_cut
from golden.slow_cut import ROLES, Case, Planes, cases
from hypothesis import given
from hypothesis import strategies as st
from test_geometry import model
from test_plan import planned, quick, sources_of, targets_of

from parallel.chunking import Bucket, Plane, Slice, buckets, part_of, planes_of
from parallel.layout import Layout
from parallel.model_geometry import Rect
from parallel.reshard import Move


@quick
@given(st.data())
def test_every_row_of_every_plane_lies_in_one_bucket_of_bounded_size(data):
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 2, 4])), min_size=1, max_size=8))
    planes = [Plane(0, f"p{index}", rows, cols, itemsize) for index, (rows, cols, itemsize) in enumerate(shapes)]
    limit = data.draw(st.integers(48, 300))
    filled = buckets(planes, limit)
    rows: dict[str, list[int]] = {plane.name: [] for plane in planes}
    for bucket in filled:
        assert bucket
        end = 0
        for piece in bucket:
            assert piece.offset == end and piece.rows > 0
            end += piece.nbytes
            rows[piece.plane.name] += range(piece.row, piece.row + piece.rows)
        assert end <= limit
    assert rows == {plane.name: list(range(plane.rows)) for plane in planes}


def test_a_row_larger_than_a_bucket_is_refused_by_name_and_size():
    with pytest.raises(ValueError, match="one row of wide.weight is 1024 bytes, a bucket holds 1000"):
        buckets([Plane(0, "wide.weight", 3, 512, 2)], 1000)
    assert len(buckets([Plane(0, "wide.weight", 3, 512, 2)], 1024)) == 3


def test_an_fp8_weight_has_two_planes_and_a_vector_one_of_one_column():
    planes = planes_of({3: targets_of(Case(model(), Layout(), 1))[0]}, ROLES, 4)
    found = {plane.name: plane for plane in planes}
    assert found["model.norm.weight"] == Plane(3, "model.norm.weight", 256, 1, 4)
    assert found["model.layers.0.mlp.down_proj.weight"] == Plane(3, "model.layers.0.mlp.down_proj.weight", 256, 1024, 1)
    assert found["model.layers.0.mlp.down_proj.weight_scale_inv"] == Plane(3, "model.layers.0.mlp.down_proj.weight_scale_inv", 2, 8, 4)


def through_a_bucket(bucket: Bucket, plan: list[Move], sources: dict[int, Planes], engine: dict[int, Planes]) -> None:
    """What a sync does: sources write their rectangles into one flat memory, the engine copies whole rows out of it."""
    memory = np.zeros(sum(piece.nbytes for piece in bucket), np.uint8)
    for piece in bucket:
        window = memory[piece.offset : piece.offset + piece.nbytes].view(engine[piece.plane.rank][piece.plane.name].dtype)
        window = window.reshape(piece.rows, piece.plane.cols)
        for move in plan:
            if (move.target_rank, move.target) == (piece.plane.rank, piece.plane.name) and (part := part_of(move, piece)):
                a, b = part
                values = sources[move.source_rank][move.source][a.row : a.row + a.rows, a.col : a.col + a.cols]
                window[b.row : b.row + b.rows, b.col : b.col + b.cols] = values
        engine[piece.plane.rank][piece.plane.name][piece.row : piece.row + piece.rows] = window


@quick
@given(cases(), st.integers(1, 5))
def test_the_engine_gets_the_same_through_tiny_buckets(case, times):
    source = slow_cut.checkpoint(case.model)
    sources = slow_cut.cut_all(sources_of(case), source)
    expected = slow_cut.cut_all(targets_of(case), source)
    planes = planes_of(targets_of(case), ROLES, 2)
    for plane in planes:
        array = expected[plane.rank][plane.name]
        padded = plane.name in ("model.embed_tokens.weight", "lm_head.weight")  # padding rows of a vocabulary are in no bucket
        assert plane.rows == array.shape[0] or (padded and plane.rows < array.shape[0])
        assert (array.shape[1], array.itemsize) == (plane.cols, plane.itemsize)
    assert len(planes) == sum(map(len, expected.values()))
    engine = {rank: {name: np.zeros_like(plane) for name, plane in held.items()} for rank, held in expected.items()}
    limit = max(plane.cols * plane.itemsize for plane in planes) * 16 * times  # many buckets, most of which end inside a parameter
    cut = buckets(planes, limit)
    assert len(cut) > 1
    plan = planned(case)
    for bucket in cut:
        through_a_bucket(bucket, plan, sources, engine)
    slow_cut.assert_same(engine, expected)


@pytest.mark.parametrize(
    "row, rows, expected",
    [
        (0, 10, None),  # ends where the move begins
        (0, 11, (Rect(100, 7, 1, 5), Rect(10, 3, 1, 5))),
        (12, 4, (Rect(102, 7, 4, 5), Rect(0, 3, 4, 5))),
        (18, 9, (Rect(108, 7, 2, 5), Rect(0, 3, 2, 5))),
        (20, 5, None),
    ],
)
def test_the_part_of_a_move_in_a_slice(row, rows, expected):
    move = Move(0, "a", Rect(100, 7, 10, 5), 0, "b", Rect(10, 3, 10, 5), "fp8")
    assert part_of(move, Slice(Plane(0, "b", 40, 8, 1), row, rows, 0)) == expected
