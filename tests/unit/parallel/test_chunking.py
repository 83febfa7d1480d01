"""Chunks are bounded and complete, and deliver the same bytes as the transfers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.geometries import plan_case, small_model, source_shards, target_shards
from support.golden import slow_cut
from support.golden.slow_cut import Case, as_fp8, cases

from parallel.chunking import clip_transfer, make_chunks
from parallel.formats import BF16, FP8, TensorFormat
from parallel.layout import Layout
from parallel.reshard import Transfer, list_stored_tensors
from parallel.shards import Rect


def whole(name: str, rows: int, cols: int, format: TensorFormat) -> Transfer:
    return Transfer(0, name, Rect(0, 0, rows, cols), 0, name, Rect(0, 0, rows, cols), format)


@given(st.data())
def test_every_row_of_every_tensor_lies_in_one_chunk_of_bounded_size(data):
    itemsize = {FP8: 1, BF16: 2, FP8.scale: 4}
    shape = st.tuples(st.integers(1, 40), st.integers(1, 12), st.sampled_from(list(itemsize)))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=8))
    transfers = [whole(f"p{index}", *shape) for index, shape in enumerate(shapes)]
    limit = data.draw(st.integers(48, 300))
    rows: dict[str, list[int]] = {transfer.target: [] for transfer in transfers}
    end = 0
    for chunk in make_chunks(transfers, limit):
        assert chunk.sources == chunk.targets and chunk.offset == end
        end += chunk.nbytes
        nbytes = 0
        for name, rect in chunk.targets:
            format, cols = next((transfer.format, transfer.target_rect.cols) for transfer in transfers if transfer.target == name)
            assert rect.rows > 0 and (rect.col, rect.cols) == (0, cols)
            nbytes += rect.rows * cols * itemsize[format]
            rows[name] += range(rect.row, rect.row + rect.rows)
        assert 0 < nbytes == chunk.nbytes <= limit
    assert rows == {transfer.target: list(range(transfer.target_rect.rows)) for transfer in transfers}


def test_a_row_larger_than_a_chunk_is_refused_by_name_and_size():
    with pytest.raises(ValueError, match="one row of wide.weight is 1024 bytes, a chunk holds 1000"):
        make_chunks([whole("wide.weight", 3, 512, BF16)], 1000)
    assert len(make_chunks([whole("wide.weight", 3, 512, BF16)], 1024)) == 3


def test_an_fp8_weight_is_stored_as_two_tensors_and_a_vector_as_one():
    stored = list_stored_tensors(target_shards(Case(small_model(), Layout(), 1))[0], as_fp8)
    assert stored["model.norm.weight"] == (BF16, (256,))
    assert stored["model.layers.0.mlp.down_proj.weight"] == (FP8, (256, 1024))
    assert stored["model.layers.0.mlp.down_proj.weight_scale_inv"] == (FP8.scale, (2, 8))


@given(cases(), st.integers(1, 5))
def test_tiny_chunks_deliver_the_same_bytes(case, times):
    source = slow_cut.checkpoint(case.model)
    sources = slow_cut.cut_all(source_shards(case), source)
    expected = slow_cut.cut_all(target_shards(case), source)
    assert all(list_stored_tensors(shards, as_fp8).keys() == expected[rank].keys() for rank, shards in target_shards(case).items())
    engine = {rank: {name: np.zeros_like(array) for name, array in arrays.items()} for rank, arrays in expected.items()}
    limit = 16 * times * max(array[0].nbytes for arrays in expected.values() for array in arrays.values())
    chunks = make_chunks(plan_case(case), limit)  # most chunks end inside a parameter
    assert len(chunks) > 1
    for chunk in chunks:
        assert chunk.nbytes <= limit
        for (from_name, a), (to_name, b) in zip(chunk.sources, chunk.targets, strict=True):
            values = sources[chunk.source][from_name][a.row : a.row + a.rows, a.col : a.col + a.cols]
            engine[chunk.target][to_name][b.row : b.row + b.rows, b.col : b.col + b.cols] = values
    slow_cut.assert_same(engine, expected)


def test_clip_transfer():
    transfer = Transfer(0, "a", Rect(100, 7, 10, 5), 0, "b", Rect(10, 3, 10, 5), FP8)
    assert clip_transfer(transfer, 0, 10) is clip_transfer(transfer, 20, 25) is None  # rows before the transfer; rows after it
    for start, end, row, rows in ((0, 11, 0, 1), (12, 16, 2, 4), (18, 27, 8, 2)):
        assert clip_transfer(transfer, start, end) == (Rect(100 + row, 7, rows, 5), Rect(10 + row, 3, rows, 5))
