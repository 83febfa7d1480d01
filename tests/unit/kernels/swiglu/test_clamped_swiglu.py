"""Clamped SwiGLU of gpt-oss: the function, its gradient, and bits that do not depend on the number of rows."""

import torch
from support.kernel_tests import random

from megatron_rl.kernels.swiglu.clamped import clamped_swiglu


def by_torch(x: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def test_it_is_rounded_once_and_has_the_gradient_of_float64():
    x = (3 * random(33, 96, seed=0)).bfloat16()
    exact = by_torch(x.double(), 2.0)
    assert ((clamped_swiglu(x, 2.0).double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-6).all()
    x, dy = (3 * random(33, 96, seed=0)).requires_grad_(), random(33, 48, seed=1)
    double = x.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(clamped_swiglu(x, 2.0), x, dy)
    (wanted,) = torch.autograd.grad(by_torch(double, 2.0), double, dy.double())
    assert (found - wanted).norm() < 1e-6 * wanted.norm()
    assert 0.3 < (wanted == 0).double().mean() < 0.7, "some are clamped"


def test_a_row_alone_has_the_same_bits():
    x = 3 * random(50, 90, seed=2)
    together = clamped_swiglu(x, 7.0)
    assert all(torch.equal(clamped_swiglu(part, 7.0)[0], whole) for part, whole in zip(x.split(1), together, strict=True))
