"""Queries and keys in one pass: the values and gradients of split, norms and rotation, and the kernels in Triton's interpreter."""

import pytest
import torch
from support.kernel_tests import in_interpreter, random

from megatron_rl.kernels.heads import Heads, reference
from megatron_rl.kernels.heads.reference import can_rotate, split_heads
from megatron_rl.kernels.rope.reference import Rotation

POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 0, 6, 5])
GROUPS, QUERIES, DIM = 2, 3, 16


def make_heads(interleaved: bool) -> Heads:
    angles = torch.outer(torch.arange(9.0), 1 / 10000 ** (torch.arange(DIM // 2) / DIM))
    return Heads(GROUPS, QUERIES, Rotation.from_angles(angles, POSITIONS, interleaved), 1e-6)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_it_is_split_norm_and_rotation_with_their_gradients(interleaved, normed):
    heads, mixed = make_heads(interleaved), random(9, GROUPS * (QUERIES + 2) * DIM, seed=0).requires_grad_()
    weights = tuple(torch.linspace(start, 2, DIM).requires_grad_() for start in (-1, 0.5)) if normed else None
    found = split_heads(mixed, heads, weights)
    query, key, value = mixed.view(9, GROUPS, QUERIES + 2, DIM).split([QUERIES, 1, 1], 2)
    if weights:
        query, key = (torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-6) for x, weight in zip((query, key), weights, strict=True))
    wanted = *(heads.rotation.rotate(x.flatten(1, 2)) for x in (query, key)), value.flatten(1, 2)
    gradients = [random(*x.shape, seed=1) for x in wanted]
    assert all(torch.allclose(a, b, atol=1e-5) and a.shape == b.shape for a, b in zip(found, wanted, strict=True))
    assert found[2].data_ptr() == mixed[:, (QUERIES + 1) * DIM :].data_ptr(), "values are copied"
    inputs = (mixed, *(weights or ()))
    for a, b in zip(torch.autograd.grad(found, inputs, gradients), torch.autograd.grad(wanted, inputs, gradients), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@in_interpreter
def test_the_kernels_results_are_the_references():
    """Up to the last bits: the interpreter has no fused multiply-add and truncates to BF16."""
    from megatron_rl.kernels.heads.triton import differentiate_heads, rotate_heads

    for dtype, interleaved, normed in ((torch.float32, False, True), (torch.bfloat16, True, True), (torch.float32, True, False)):
        heads, mixed = make_heads(interleaved), random(9, GROUPS * (QUERIES + 2) * DIM, seed=0, dtype=dtype)
        norms = (torch.linspace(-1, 2, DIM).to(dtype), torch.linspace(0.5, 2, DIM).to(dtype)) if normed else None
        near = {"rtol": 2**-6, "atol": 2e-2} if dtype is torch.bfloat16 else {"atol": 1e-5}
        for a, b in zip(rotate_heads(mixed, heads, norms), reference.rotate_heads(mixed, heads, norms), strict=True):
            assert torch.allclose(a.float(), b.float(), **near)
        gradients = tuple(random(9, count, DIM, seed=1, dtype=dtype) for count in (GROUPS * QUERIES, GROUPS, GROUPS))
        found, of_norms = differentiate_heads(gradients, mixed, heads, norms)
        wanted, of_norms_wanted = reference.differentiate_heads(gradients, mixed, heads, norms)
        assert torch.allclose(found.float(), wanted.float(), **near) and (of_norms is None) == (norms is None)
        for a, b in zip(of_norms or (), of_norms_wanted or (), strict=True):
            assert a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=near.get("rtol", 1e-5), atol=5 * near["atol"])


def test_heads_that_are_rotated_in_part_are_not_supported():
    rotation = make_heads(False).rotation
    assert can_rotate(rotation, DIM) and not can_rotate(rotation, 2 * DIM) and not can_rotate(rotation, 24)
