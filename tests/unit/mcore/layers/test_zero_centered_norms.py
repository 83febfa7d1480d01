"""Norms that multiply by 1 + weight (Qwen3-Next, Qwen3.5), alone and fused with the following layer."""

from types import SimpleNamespace

import pytest
import torch
from support.kernel_tests import random

from megatron_rl.kernels.norm.reference import normalize
from megatron_rl.mcore.layers.linear.norms import NormFusion, RMSNorm, SumFusion, Summands

EPS, WIDTH = 1e-6, 256


def make_norm(zero_centered, weight):
    config = SimpleNamespace(params_dtype=weight.dtype, zero_centered_norms=zero_centered, sequence_parallel=False)
    norm = RMSNorm(config, WIDTH, EPS)
    norm.weight.data = weight.clone()
    return norm


class _Layer:
    """A layer whose backend normalizes as the fused kernel does, without quantizing."""

    weight = SimpleNamespace(requires_grad=True)
    backend = SimpleNamespace(quantize_norm=lambda x, residual, weight, eps, columns: normalize(x, residual, weight, eps))


def test_the_scale_is_one_plus_the_weight_in_float32():
    weight, x = 0.2 * random(WIDTH, seed=0), random(7, WIDTH, seed=1)
    centered, plain = make_norm(True, weight), make_norm(False, 1 + weight)
    assert torch.equal(centered(x), plain(x))
    rounded = make_norm(True, weight.bfloat16())
    assert rounded.scale.dtype is torch.float32 and torch.equal(rounded(None), 1 + weight.bfloat16().float())
    exact = torch.nn.functional.rms_norm(x.bfloat16().double(), (WIDTH,), 1 + weight.bfloat16().double(), EPS)
    assert (rounded(x.bfloat16()).double() - exact).abs().max() < 2**-8 * exact.abs().max()


@pytest.mark.parametrize("fused", ["", "with the addition", "with the addition and the next layer"])
def test_the_gradient_is_that_of_float64(fused):
    weight, x, residual, dy = 0.2 * random(WIDTH, seed=0), *(random(9, WIDTH, seed=seed) for seed in (1, 2, 3))
    leaves = [value.double().requires_grad_() for value in (x, residual, weight)]
    normed = torch.nn.functional.rms_norm(leaves[0] + leaves[1], (WIDTH,), 1 + leaves[2], EPS)
    expected = torch.autograd.grad((normed * dy.double()).sum(), leaves)

    norm, x, residual = make_norm(True, weight), x.requires_grad_(), residual.requires_grad_()
    if fused:
        norm.fusion = NormFusion(_Layer()) if "layer" in fused else SumFusion()
        total = norm.fusion.add(norm, Summands(x, residual))
        result = norm.fusion.take(norm, total)
        result = result.activation if "layer" in fused else result
    else:
        result = norm(x + residual)
    found = torch.autograd.grad(result, [x, residual, norm.weight], dy)
    if fused == "with the addition":
        again = norm.fusion.take(norm, total)  # nothing is kept for a second call, which computes the norm of its input
        assert torch.equal(again, result) and torch.equal(torch.autograd.grad(again, norm.weight, dy)[0], found[2])
        assert torch.equal(torch.autograd.grad(norm.fusion.add(norm, Summands(x, residual)), x, dy)[0], dy), "a sum whose norm is not read"
    for gradient, value in zip(found, expected, strict=True):
        assert (gradient - value).norm() < 1e-6 * value.norm()
