"""Buckets: bounded, complete, and with the moves cut along them the engine still gets the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.geometries import few_examples, plan_case, small_model, source_shards, target_shards
from support.golden import slow_cut
from support.golden.slow_cut import ROLES, Arrays, Case, cases

from parallel.chunking import Bucket, RowRange, TensorSpec, clip_transfer, fill_buckets, list_tensor_specs
from parallel.layout import Layout
from parallel.reshard import Transfer
from parallel.shards import Rect


@few_examples
@given(st.data())
def test_every_row_of_every_plane_lies_in_one_bucket_of_bounded_size(data):
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 2, 4])), min_size=1, max_size=8))
    specs = [TensorSpec(0, f"p{index}", rows, cols, itemsize) for index, (rows, cols, itemsize) in enumerate(shapes)]
    limit = data.draw(st.integers(48, 300))
    filled = fill_buckets(specs, limit)
    rows: dict[str, list[int]] = {spec.name: [] for spec in specs}
    for bucket in filled:
        assert bucket
        end = 0
        for row_range in bucket:
            assert row_range.offset == end and row_range.rows > 0
            end += row_range.nbytes
            rows[row_range.spec.name] += range(row_range.row, row_range.row + row_range.rows)
        assert end <= limit
    assert rows == {spec.name: list(range(spec.rows)) for spec in specs}


def test_a_row_larger_than_a_bucket_is_refused_by_name_and_size():
    with pytest.raises(ValueError, match="one row of wide.weight is 1024 bytes, a bucket holds 1000"):
        fill_buckets([TensorSpec(0, "wide.weight", 3, 512, 2)], 1000)
    assert len(fill_buckets([TensorSpec(0, "wide.weight", 3, 512, 2)], 1024)) == 3


def test_an_fp8_weight_has_two_planes_and_a_vector_one_of_one_column():
    specs = list_tensor_specs({3: target_shards(Case(small_model(), Layout(), 1))[0]}, ROLES, 4)
    found = {spec.name: spec for spec in specs}
    assert found["model.norm.weight"] == TensorSpec(3, "model.norm.weight", 256, 1, 4)
    assert found["model.layers.0.mlp.down_proj.weight"] == TensorSpec(3, "model.layers.0.mlp.down_proj.weight", 256, 1024, 1)
    assert found["model.layers.0.mlp.down_proj.weight_scale_inv"] == TensorSpec(3, "model.layers.0.mlp.down_proj.weight_scale_inv", 2, 8, 4)


def through_a_bucket(bucket: Bucket, plan: list[Transfer], sources: dict[int, Arrays], engine: dict[int, Arrays]) -> None:
    """What a sync does: sources write their rectangles into one flat memory, the engine copies whole rows out of it."""
    memory = np.zeros(sum(rows.nbytes for rows in bucket), np.uint8)
    for row_range in bucket:
        window = memory[row_range.offset : row_range.offset + row_range.nbytes].view(engine[row_range.spec.rank][row_range.spec.name].dtype)
        window = window.reshape(row_range.rows, row_range.spec.cols)
        for transfer in plan:
            if (transfer.target_rank, transfer.target) == (row_range.spec.rank, row_range.spec.name) and (
                part := clip_transfer(transfer, row_range)
            ):
                a, b = part
                values = sources[transfer.source_rank][transfer.source][a.row : a.row + a.rows, a.col : a.col + a.cols]
                window[b.row : b.row + b.rows, b.col : b.col + b.cols] = values
        engine[row_range.spec.rank][row_range.spec.name][row_range.row : row_range.row + row_range.rows] = window


@few_examples
@given(cases(), st.integers(1, 5))
def test_the_engine_gets_the_same_through_tiny_buckets(case, times):
    source = slow_cut.checkpoint(case.model)
    sources = slow_cut.cut_all(source_shards(case), source)
    expected = slow_cut.cut_all(target_shards(case), source)
    specs = list_tensor_specs(target_shards(case), ROLES, 2)
    for spec in specs:
        array = expected[spec.rank][spec.name]
        padded = spec.name in ("model.embed_tokens.weight", "lm_head.weight")  # padding rows of a vocabulary are in no bucket
        assert spec.rows == array.shape[0] or (padded and spec.rows < array.shape[0])
        assert (array.shape[1], array.itemsize) == (spec.cols, spec.itemsize)
    assert len(specs) == sum(map(len, expected.values()))
    engine = {rank: {name: np.zeros_like(array) for name, array in held.items()} for rank, held in expected.items()}
    limit = max(spec.cols * spec.itemsize for spec in specs) * 16 * times  # many buckets, most of which end inside a parameter
    cut = fill_buckets(specs, limit)
    assert len(cut) > 1
    plan = plan_case(case)
    for bucket in cut:
        through_a_bucket(bucket, plan, sources, engine)
    slow_cut.assert_same(engine, expected)


@pytest.mark.parametrize(
    "row, rows, expected",
    [
        (0, 10, None),  # ends where the transfer begins
        (0, 11, (Rect(100, 7, 1, 5), Rect(10, 3, 1, 5))),
        (12, 4, (Rect(102, 7, 4, 5), Rect(0, 3, 4, 5))),
        (18, 9, (Rect(108, 7, 2, 5), Rect(0, 3, 2, 5))),
        (20, 5, None),
    ],
)
def test_the_part_of_a_move_in_a_slice(row, rows, expected):
    transfer = Transfer(0, "a", Rect(100, 7, 10, 5), 0, "b", Rect(10, 3, 10, 5), "fp8")
    assert clip_transfer(transfer, RowRange(TensorSpec(0, "b", 40, 8, 1), row, rows, 0)) == expected
