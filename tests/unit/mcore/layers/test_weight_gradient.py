"""On a GPU the output layer's gradient is added to the buffer by the product itself. Tensors without data play the GPU's."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.mcore.layers.weight_gradient import WeightGradient


def test_a_chunk_makes_no_matrix_of_the_weights_size(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "addmm", lambda *tensors, **options: calls.append((tensors, options)))
    with FakeTensorMode():
        weight: Any = torch.nn.Parameter(torch.empty(512, 64, dtype=torch.bfloat16, device="cuda"))
        weight.main_grad = torch.empty(512, 64, device="cuda")
        dy, x = (torch.empty(8, width, dtype=torch.bfloat16, device="cuda") for width in (512, 64))
        WeightGradient(weight, 0).add(dy, x)
        assert WeightGradient(weight, 0).finish().shape == weight.shape and weight.grad_added_to_main_grad
    (((into, left, right), options),) = calls
    assert into is weight.main_grad is options["out"] and options["out_dtype"] is torch.float32
    assert left.shape == (512, 8) and right is x
