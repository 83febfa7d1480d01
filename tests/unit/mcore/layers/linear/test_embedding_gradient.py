"""The gradient of an embedding on a GPU, computed on a CPU: added to Megatron's buffer if there is one."""

import pytest
import torch
from support.kernel_tests import random

from megatron_rl.mcore.layers.linear.high_precision import _Lookup


@pytest.mark.parametrize("has_buffer", [False, True])
def test_rows_of_tokens_and_their_gradient(has_buffer):
    tokens, dy = torch.tensor([[3, -1, 3, 0, 9]]), random(1, 5, 16, seed=0)  # of the rank's vocabulary of 9; the others are elsewhere
    weight, here = random(9, 16, seed=1).requires_grad_(), ((tokens >= 0) & (tokens < 9)).unsqueeze(-1)
    wanted = torch.nn.functional.embedding(tokens.clamp(0, 8), weight) * here
    (of_weight,) = torch.autograd.grad(wanted, weight, dy)
    if has_buffer:
        weight.main_grad = random(9, 16, seed=2)
        of_weight = of_weight + weight.main_grad
    found = _Lookup.apply(weight, tokens)
    assert torch.equal(found, wanted)
    found.backward(dy)
    assert torch.allclose(weight.main_grad if has_buffer else weight.grad, of_weight, atol=1e-6)
    assert getattr(weight, "grad_added_to_main_grad", False) == has_buffer
