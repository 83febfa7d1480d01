"""The INT8 quantizer and product against SGLang's formula, computed slowly value by value."""

from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fp8_reference import uneven_matrix

from megatron_rl.precision.int8 import int8_matmul, quantize_int8_weight, row_maxima

F = np.float32


def slow(matrix: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return (INT8 numbers, scales) as `per_token_quant_int8` computes them row by row, in its order of operations."""
    rows, scales = [], []
    for row in matrix.float().numpy():
        absmax = max(F(max(abs(float(value)) for value in row)), F(1e-10))
        inverse = F(127) / absmax
        # Decimal's HALF_UP is away from zero, and Decimal of a float is exact
        rows.append([int(Decimal(float(F(value) * inverse)).quantize(Decimal(1), ROUND_HALF_UP)) for value in row])
        scales.append([absmax / F(127)])
    return np.array(rows), np.array(scales, F)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_quantized_as_sglangs_kernel_quantizes_rows(dtype):
    weight = uneven_matrix(40, 300, 1).to(dtype)
    codes, scales = slow(weight)
    quantized = quantize_int8_weight(weight)
    assert (quantized.data.dtype, quantized.data.shape) == (torch.int8, (40, 300))
    assert (quantized.scale.dtype, quantized.scale.shape) == (torch.float32, (40, 1))
    assert np.array_equal(quantized.data.numpy(), codes) and np.array_equal(quantized.scale.numpy(), scales)
    assert quantized.data.abs().amax(1).eq(127).all()  # the largest value of a row uses the whole range


def test_parts_of_rows_with_the_maxima_of_whole_rows_are_the_parts_of_the_whole():
    weight = uneven_matrix(16, 96, 2)
    whole, amax = quantize_int8_weight(weight), row_maxima(weight)
    for part in (slice(0, 32), slice(32, 96)):
        quantized = quantize_int8_weight(weight[:, part], amax)
        assert torch.equal(quantized.data, whole.data[:, part]) and torch.equal(quantized.scale, whole.scale)


@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from([1, 100, 1023, 1024, 1025, 3000]), st.integers(0, 1000))
def test_the_product_is_integer_sums_scaled_once(tokens, rows, cols, seed):
    x, weight = uneven_matrix(tokens, cols, seed), quantize_int8_weight(uneven_matrix(rows, cols, seed + 1))
    codes, scales = slow(x)
    exact = codes.astype(np.int64) @ weight.data.numpy().astype(np.int64).T
    expected = exact.astype(F) * (scales * weight.scale.numpy().T)
    assert np.array_equal(int8_matmul(x, weight.data.float(), weight.scale).numpy(), expected)


def test_the_largest_sums_ties_and_zeros_are_exact():
    """5000 products of 127 * 127 and one of 1: FP32 would lose the last one, INT32 does not."""
    x, weight = torch.full((1, 5001), 127.0), torch.full((1, 5001), 127.0)
    x[0, 2500] = weight[0, 2500] = 1.0
    quantized = quantize_int8_weight(weight)
    assert float(int8_matmul(x, quantized.data.float(), quantized.scale)) == float(F(5000 * 127 * 127 + 1))
    assert 5000 * 127 * 127 + 1 > 2**24
    for dtype in (torch.float32, torch.bfloat16):
        y = int8_matmul(x.expand(2, 3, 5001).to(dtype), quantized.data.float(), quantized.scale)
        assert y.shape == (2, 3, 1) and y.dtype == dtype, "the product keeps shape and dtype"
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -2.5, 0.5 - 2**-25, 126.5, -0.0]])
    assert quantize_int8_weight(weight).data.tolist() == [[127, 1, 2, 3, -1, -3, 0, 127, 0]]
    quantized = quantize_int8_weight(torch.tensor([[0.0, 0.0], [1e-10, -4e-11], [1e-12, 0.0]]))  # below the epsilon
    assert quantized.data.tolist() == [[0, 0], [127, -51], [1, 0]]
    assert quantized.scale.flatten().eq(F(1e-10) / F(127)).all()
