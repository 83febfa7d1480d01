"""The three products of a linear layer against the contract's equations, computed slowly in float64."""

import pytest
import torch
from support.fp8_reference import both_scale_formats, uneven_matrix
from support.golden import slow_fp8

from megatron_rl.kernels.linear.reference import dgrad, fprop, value_dtype, wgrad
from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight

TOKENS, N, K = 150, 256, 300  # K and TOKENS are no multiples of 128 on purpose


@both_scale_formats
def test_the_three_products(scale_format):
    """FProp multiplies rows of activations with weight blocks, DGrad the same blocks transposed; WGrad quantizes along the tokens."""
    x, dy, weight = uneven_matrix(TOKENS, K, 1), uneven_matrix(TOKENS, N, 2), uneven_matrix(N, K, 3)
    values = dequantize_weight(quantize_weight(weight, scale_format))
    products = fprop(x, values, scale_format), dgrad(dy, values, scale_format), wgrad(dy, x, scale_format)
    for got, operands in zip(products, slow_fp8.multiply(weight.numpy(), x.numpy(), dy.numpy(), scale_format), strict=True):
        assert got.dtype == torch.float32
        slow_fp8.assert_product(got, *operands)


@both_scale_formats
def test_bf16_comes_back_as_bf16_rounded_once(scale_format):
    x, dy = uneven_matrix(5, 256).bfloat16(), uneven_matrix(5, 128).bfloat16()
    weight = dequantize_weight(quantize_weight(uneven_matrix(128, 256), scale_format))
    for product, operand in ((fprop, x), (dgrad, dy)):
        got = product(operand, weight, scale_format)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, product(operand.float(), weight, scale_format).bfloat16())
    assert wgrad(dy, x, scale_format).dtype == torch.float32  # accumulated in FP32
    split = x[:4].float().view(2, 2, 256)  # leading dimensions are kept
    y = fprop(split, weight, scale_format)
    assert y.shape == (2, 2, 128) and dgrad(split[..., :128], weight, scale_format).shape == (2, 2, 256)
    assert torch.allclose(y.view(4, 128), fprop(split.view(4, 256), weight, scale_format), rtol=1e-5, atol=1e-5)


def test_bf16_values_of_pow2_blocks_are_exact_and_multiply_as_float32_does():
    """Only the order of FP32 sums may differ, before the result is rounded to bf16: one step of bf16 at most, and seldom."""
    x, dy = uneven_matrix(40, 256).bfloat16(), uneven_matrix(40, 128).bfloat16()
    exact = dequantize_weight(quantize_weight(uneven_matrix(128, 256), "pow2"))
    narrow = exact.to(value_dtype(x, "pow2"))
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow.float(), exact)
    assert value_dtype(x, "fp32") == value_dtype(x.float(), "pow2") == torch.float32
    for product, operand in ((fprop, x), (dgrad, dy)):
        got, wanted = product(operand, narrow, "pow2").float(), product(operand, exact, "pow2").float()
        assert (got != wanted).float().mean() < 0.01
        assert ((got - wanted).abs() <= 2.0**-7 * wanted.abs()).all()


@pytest.mark.parametrize("tokens", [1, 16, 300, 1344])
def test_threads_share_products_with_the_bits_of_one(tokens):
    x, dy, w = torch.randn(tokens, 256), torch.randn(tokens, 768), torch.randn(768, 256)

    def multiply(threads: int) -> list[torch.Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return [product(*operands, "pow2") for product, operands in ((fprop, (x, w)), (dgrad, (dy, w)), (wgrad, (dy, x)))]
        finally:
            torch.set_num_threads(before)

    assert all(torch.equal(one, several) for threads in (2, 3) for one, several in zip(multiply(1), multiply(threads), strict=True))
