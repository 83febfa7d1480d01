"""The gradient of an embedding: rows of equal tokens are added in order, and tokens of other ranks are left out."""

import pytest
import torch
from support.kernel_tests import in_interpreter, random

from megatron_rl.kernels.embedding import reference
from megatron_rl.kernels.embedding.reference import add_token_rows

TOKENS = torch.tensor([3, 7, 3, -2, 0, 3, 9, 6, 0, 11, 7, 3])  # of a vocabulary of 9


def test_the_sums_are_those_of_the_dense_gradient():
    weight, rows, sums = torch.zeros(9, 24).requires_grad_(), random(len(TOKENS), 24, seed=0), random(9, 24, seed=1)
    here = (TOKENS >= 0) & (TOKENS < 9)
    out = torch.nn.functional.embedding(TOKENS * here, weight) * here[:, None]
    wanted = sums + torch.autograd.grad(out, weight, rows)[0]
    add_token_rows(sums, TOKENS, rows)
    assert torch.allclose(sums, wanted, atol=1e-6)


@in_interpreter
def test_the_kernel_has_the_bits_of_the_reference():
    from megatron_rl.kernels.embedding import triton as kernels

    for dtype, width in ((torch.bfloat16, 24), (torch.float32, 1030)):
        rows, sums = random(len(TOKENS), width, seed=0, dtype=dtype), random(9, width, seed=1)
        wanted = sums.clone()
        reference.add_token_rows(wanted, TOKENS, rows)
        for tokens, own in ((TOKENS, rows), (TOKENS[:0], rows[:0])):
            kernels.add_token_rows(sums, tokens, own)
        assert torch.equal(sums, wanted)
    for wrong in ((sums, TOKENS[1:], rows), (sums.double(), TOKENS, rows), (sums.t(), TOKENS, rows[:, :9])):
        with pytest.raises(ValueError, match="do not match"):
            kernels.add_token_rows(*wrong)
