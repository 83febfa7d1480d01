"""Results that are computed without torch are equal to torch's."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.rehearsal.shapes import ShapeRunner, describe_call

aten = torch.ops.aten


@pytest.mark.parametrize("args", [(0, 1, 3), (1, None, None), (1, -4, -1), (0, 3, 1), (-1, 2, 1 << 62), (1, 5, 9), (0, 9, 12)])
def test_a_slice_is_where_torch_puts_it(args):
    runner, whole = ShapeRunner(), FakeTensorMode().from_tensor(torch.empty(10, 14, dtype=torch.bfloat16))[2:8, 7:]
    description, tensors = describe_call((whole, *args), {})
    found, known = runner.run(aten.slice.Tensor, (whole, *args), {}, description, tensors)
    expected = aten.slice.Tensor(torch.empty(10, 14, dtype=torch.bfloat16)[2:8, 7:], *args)
    assert known is not None and (found.dtype, found.device) == (expected.dtype, expected.device)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert found.storage_offset() == expected.storage_offset() or not expected.numel()
