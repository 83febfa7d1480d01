"""The reference quantizers against slow loops over blocks, with edge blocks cut short."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.fp8_reference import both_scale_formats, uneven_matrix
from support.golden import slow_fp8

from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight, round_to_e4m3_, round_trip_1x128, round_trip_128x1
from megatron_rl.precision.quantized_weight import QuantizedWeight


@both_scale_formats
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (1, 1), (127, 257), (300, 5)])
def test_weights_are_quantized_block_by_block(scale_format, shape):
    weight = uneven_matrix(*shape)
    blocks = quantize_weight(weight, scale_format)
    codes, scales = slow_fp8.quantize_matrix(weight.numpy(), scale_format)
    assert blocks.data.dtype == torch.float8_e4m3fn and blocks.scale.dtype == torch.float32
    assert np.array_equal(blocks.data.view(torch.uint8).numpy(), codes)
    assert np.array_equal(blocks.scale.numpy(), scales)


@both_scale_formats
def test_bf16_weights_are_quantized_as_their_values_and_inf_and_nan_refused(scale_format):
    weight = uneven_matrix(130, 140).bfloat16()
    for tensor, expected in zip(quantize_weight(weight, scale_format), quantize_weight(weight.float(), scale_format), strict=True):
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    for value in (float("nan"), float("inf"), float("-inf")):
        for place in ((0, 0), (129, 140)):
            weight = torch.ones(130, 141)
            weight[place] = value
            with pytest.raises(ValueError, match="inf or NaN"):
                quantize_weight(weight, scale_format)


def test_zero_blocks_have_zero_bytes_and_every_block_its_own_scale():
    weight = torch.zeros(128, 256)
    weight[:, 128:] = 3.0
    blocks = quantize_weight(weight, "pow2")
    assert blocks.scale.tolist() == [[2.0**-42, 2.0**-7]]
    assert (blocks.data.view(torch.uint8)[:, :128] == 0).all()
    values = dequantize_weight(QuantizedWeight(torch.ones(200, 300).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2, 3], [4, 5, 6]])))
    assert [values[row, col].item() for row in (127, 128) for col in (127, 128, 256)] == [1, 2, 3, 4, 5, 6]


@both_scale_formats
@pytest.mark.parametrize("shape", [(256, 256), (130, 200)])
def test_dequantizing_gives_each_blocks_round_trip(scale_format, shape):
    weight = uneven_matrix(*shape)
    expected = np.empty(shape, np.float32)
    for i in range(0, shape[0], 128):
        for j in range(0, shape[1], 128):
            expected[i : i + 128, j : j + 128] = slow_fp8.round_trip(weight.numpy()[i : i + 128, j : j + 128], scale_format)
    values = dequantize_weight(quantize_weight(weight, scale_format))
    assert values.dtype == torch.float32 and np.array_equal(values.numpy(), expected)
    if scale_format == "pow2":
        assert torch.equal(dequantize_weight(quantize_weight(values, "pow2")), values), "quantizing again changes no value"


@both_scale_formats
@pytest.mark.parametrize("shape", [(3, 128), (2, 256), (4, 130), (3, 5), (2, 383)])
def test_activations_in_runs_along_either_dimension(scale_format, shape):
    x = uneven_matrix(*shape)
    before, expected = x.clone(), slow_fp8.round_trip_rows(x.numpy(), scale_format)
    assert np.array_equal(round_trip_1x128(x, scale_format).numpy(), expected)
    assert np.array_equal(round_trip_1x128(x.view(shape[0], 1, shape[1]), scale_format).numpy()[:, 0], expected)  # leading dimensions
    assert np.array_equal(round_trip_1x128(x[0], scale_format).numpy(), expected[0])
    columns = x.t().contiguous()
    assert np.array_equal(round_trip_128x1(columns, scale_format).numpy(), expected.T)
    quantize_weight(x, scale_format)
    assert torch.equal(x, before) and torch.equal(columns, before.t()), "their input stays as it is"


def _cast_there_and_back(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).float()


def test_rounding_equals_the_cast_on_every_bf16_in_range():
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.abs() <= 448]  # leaves inf and NaN out
    assert len(values) == 2 * (0x43E0 + 1)
    assert torch.equal(round_to_e4m3_(values.clone()), _cast_there_and_back(values))


def test_rounding_equals_the_cast_and_the_definition_on_dense_samples():
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.rand(200_000, generator=generator) * 30 - 21).clamp(max=448)
    values = torch.cat([sizes, -sizes, torch.linspace(-448, 448, 100_001), torch.linspace(-(2**-6), 2**-6, 100_001)])
    rounded = round_to_e4m3_(values.clone())
    assert torch.equal(rounded, _cast_there_and_back(values))
    assert np.array_equal(rounded.numpy(), slow_fp8.from_codes(slow_fp8.to_codes(values.numpy())))


def test_rounding_takes_ties_to_even_and_their_neighbors_to_the_nearest():
    """Midpoints of all neighboring E4M3 numbers, subnormals too, with the FP32 numbers on either side of them."""
    low, high = slow_fp8.VALUES[:-1], slow_fp8.VALUES[1:]
    ties = ((low + high) / 2).astype(np.float32)
    even = np.where(np.arange(126) % 2, high, low)
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))
    for values, expected in ((ties, even), (below, low), (above, high), (slow_fp8.VALUES.astype(np.float32), slow_fp8.VALUES)):
        assert np.array_equal(round_to_e4m3_(torch.tensor(values)).numpy(), expected)
        assert np.array_equal(round_to_e4m3_(torch.tensor(-values)).numpy(), -expected)
    assert round_to_e4m3_(torch.tensor([1e-45, -1e-45, 1.17e-38, 0.0])).tolist() == [0, 0, 0, 0]  # FP32 subnormals
