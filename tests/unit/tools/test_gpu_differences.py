"""Comparisons say whether, where and by how much two tensors differ; rows survive a file that was cut off."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_parts.differences import compare
from gpu_parts.rows import Row, Rows, read_rows


def test_equal_bits_are_the_same():
    x = torch.tensor([[1.0, -0.0], [math.nan, math.inf]])
    assert compare(x, x.clone()).same
    assert str(compare(x, x.clone())) == "the same 4 values, bit by bit"


def test_first_worst_and_size_are_told():
    b = torch.arange(12.0).reshape(3, 4)
    a = b.clone()
    a[0, 2] += 0.5
    a[2, 1] -= 3.0
    found = compare(a, b)
    assert (found.count, found.total, found.first, found.worst) == (2, 12, (0, 2), (2, 1))
    assert (found.values, found.largest) == ((6.0, 9.0), 3.0)
    assert found.relative == pytest.approx(math.sqrt(9.25) / float(b.norm()))
    assert "2 of 12 differ (16.67%), first at [0, 2], most at [2, 1]: 6 for 9" in str(found)


def test_signs_of_zero_differ():
    found = compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.count, found.worst, found.largest, found.relative) == (1, (0,), 0.0, 0.0)


def test_a_nan_is_the_worst_difference():
    found = compare(torch.tensor([1.0, math.nan, 9.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert (found.count, found.worst, found.largest) == (2, (1,), math.inf)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.uint8])
def test_every_dtype_that_parts_compare(dtype):
    b = torch.ones(2, 3).to(dtype)
    a = torch.ones(2, 3)
    a[1, 0] = 2.0
    assert compare(a.to(dtype), b).first == (1, 0)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\[2\] torch.float32 cannot be compared with \[3\] torch.float32"):
        compare(torch.ones(2), torch.ones(3))


def test_rows_that_were_written_before_the_end_are_read(tmp_path):
    rows = Rows(tmp_path / "part.jsonl")
    rows.add("a", "as it must be", ok=True, count=3)
    with rows.guarded("b"):
        raise RuntimeError("no kernel image\nmore")
    with (tmp_path / "part.jsonl").open("a") as file:
        file.write('{"what": "cut o')
    assert read_rows(tmp_path / "part.jsonl") == [
        Row("a", "as it must be", True, {"count": 3}),
        Row("b", "RuntimeError: no kernel image", False),
    ]
    assert read_rows(tmp_path / "nothing.jsonl") == []
