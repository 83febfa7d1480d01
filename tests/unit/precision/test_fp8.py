"""FP8: the reference quantizers against slow loops over blocks, exact scales, and where Transformer Engine and SGLang differ."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from support import fp8_reference as library
from support.fp8_reference import both_scale_formats, uneven_matrix
from support.golden import slow_fp8

from megatron_rl.precision.fp8 import (
    compute_scales,
    dequantize_weight,
    quantize_1x128,
    quantize_weight,
    round_to_e4m3_,
    round_trip_1x128,
    round_trip_128x1,
)


@both_scale_formats
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (1, 1), (127, 257), (300, 5)])
def test_weights_are_quantized_block_by_block(scale_format, shape):
    for weight in (uneven_matrix(*shape), uneven_matrix(*shape).bfloat16()):
        blocks = quantize_weight(weight, scale_format)
        codes, scales = slow_fp8.quantize_matrix(weight.float().numpy(), scale_format)
        assert blocks.data.dtype == torch.float8_e4m3fn and blocks.scale.dtype == torch.float32
        assert np.array_equal(blocks.data.view(torch.uint8).numpy(), codes)
        assert np.array_equal(blocks.scale.numpy(), scales)


def test_zero_blocks_have_zero_bytes_and_the_scale_of_the_epsilon():
    weight = torch.zeros(128, 256)
    weight[:, 128:] = 3.0
    blocks = quantize_weight(weight, "pow2")
    assert blocks.scale.tolist() == [[2.0**-42, 2.0**-7]]
    assert (blocks.data.view(torch.uint8)[:, :128] == 0).all()


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


def test_rounding_equals_the_cast_on_every_bf16_in_range_and_the_definition_on_dense_samples():
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.abs() <= 448]  # leaves inf and NaN out
    assert len(values) == 2 * (0x43E0 + 1)
    assert torch.equal(round_to_e4m3_(values.clone()), values.to(torch.float8_e4m3fn).float())
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.rand(200_000, generator=generator) * 30 - 21).clamp(max=448)
    values = torch.cat([sizes, -sizes, torch.linspace(-448, 448, 100_001), torch.linspace(-(2**-6), 2**-6, 100_001)])
    rounded = round_to_e4m3_(values.clone())
    assert torch.equal(rounded, values.to(torch.float8_e4m3fn).float())
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


ALL_POSITIVE_BF16 = (torch.arange(1, 0x7F80, dtype=torch.int32) << 16).view(torch.float32)  # 32639 finite values


EDGES = np.array([m * 2.0**k for m in (448, 256) for k in range(-40, 116)], np.float32)  # where one scale ends and the next begins
AROUND_EDGES = torch.from_numpy(np.concatenate([np.nextafter(EDGES, np.float32(end)) for end in (0, np.inf)] + [EDGES]))


@pytest.mark.parametrize("amax", [ALL_POSITIVE_BF16, AROUND_EDGES], ids=["every bf16", "edges of binades"])
def test_pow2_is_exactly_the_smallest_power_of_two_that_fits(amax):
    scale, inverse = compute_scales(amax, "pow2")
    for value, got in zip(amax.tolist(), scale.tolist(), strict=True):
        value = max(value, float(np.float32(1e-10)))
        assert Fraction(value) <= 448 * Fraction(got), f"amax {value!r} does not fit under scale {got!r}"
        assert Fraction(value) > 224 * Fraction(got), f"amax {value!r} would fit under half the scale {got!r}"
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert (scale * inverse == 1).all()


def test_the_slow_reference_agrees_with_known_values():
    """The reference the other tests lean on, against numbers of the format's specification."""
    assert slow_fp8.VALUES[[0, 1, 7, 8, 56, 126]].tolist() == [0, 2**-9, 7 * 2**-9, 2**-6, 1.0, 448]
    assert slow_fp8.to_codes(np.array([1.0, -1.0, 448.0, 1e9, 0.0, -0.0, 2**-10, 3 * 2**-10])).tolist() == [56, 184, 126, 126, 0, 128, 0, 2]
    assert [slow_fp8.scale_exponent(value) for value in (448.0, 448.00003, 224.0, 1.0)] == [0, 1, -1, -8]


ALL_BF16 = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)  # zero, the subnormals and every finite value above
CLAMPED = np.count_nonzero(np.less(ALL_BF16, np.float32(1e-10)))
ONE_BINADE = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
"""Every mantissa of FP32. Powers of two scale every formula exactly, as long as nothing is clamped."""


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the number of FP32 steps between positive values."""
    return np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32))


@pytest.mark.parametrize(
    "formula, scale_format",
    [(library.transformer_engine_pow2, "pow2"), (library.sglang_cuda_pow2, "pow2"), (library.transformer_engine_fp32, "fp32")],
)
@pytest.mark.parametrize("amax", [ALL_BF16, ONE_BINADE], ids=["every bf16", "every mantissa"])
def test_no_power_of_two_scale_differs_and_no_fp32_scale_from_transformer_engines(formula, scale_format, amax):
    for scales, contract in zip(formula(amax), compute_scales(torch.from_numpy(amax), scale_format), strict=True):
        assert np.array_equal(scales, contract.numpy())


@pytest.mark.parametrize(
    "formula, differing, largest, of_mantissas",
    [(library.sglang_cuda_fp32, 11_772, 2, 0.52415), (library.sglang_triton_fp32, 6_446, 1, 0.27177)],
)
def test_fp32_scales_differ_in_known_fractions(formula, differing, largest, of_mantissas):
    """57 % and 31 % of the 20,644 block maxima of bf16 from 1e-10 on; all below are clamped to one value."""
    apart = ulps(formula(ALL_BF16)[0], library.transformer_engine_fp32(ALL_BF16)[0])
    assert CLAMPED == 11_996 and len(set(apart[:CLAMPED])) == 1
    assert np.count_nonzero(apart[CLAMPED:]) == differing and apart.max() == largest
    apart = ulps(formula(ONE_BINADE)[0], library.transformer_engine_fp32(ONE_BINADE)[0])
    assert np.count_nonzero(apart) / len(apart) == pytest.approx(of_mantissas, abs=1e-5)


def test_clamped_scales_differ_by_one_step_only_in_sglangs_kernel():
    """A block of zeros: the stored FP32 scale, which multiplies nothing but zeros."""
    zero = np.zeros(1, np.float32)
    expected = library.transformer_engine_fp32(zero)[0]
    assert ulps(library.sglang_cuda_fp32(zero)[0], expected) == 1 and ulps(library.sglang_triton_fp32(zero)[0], expected) == 0
    assert library.transformer_engine_pow2(zero)[0] == library.sglang_cuda_pow2(zero)[0] == 2.0**-42


@both_scale_formats
@pytest.mark.parametrize("magnitude", [1e-44, 1e-12, 1.0, 1e29, 1e30, 1e36])
def test_round_trips_in_parts_are_the_bits_of_a_cast(magnitude, scale_format):
    x = torch.randn(1500, 384, generator=torch.Generator().manual_seed(0)) * magnitude
    x[7], x[9, 3] = 0, -0.0
    data, scale = quantize_1x128(x, scale_format)
    expected = data.float() * scale.repeat_interleave(128, 1)
    with torch.inference_mode():
        served = round_trip_1x128(x.clone(), scale_format)
    with torch.no_grad():
        trained = round_trip_1x128(x.clone().requires_grad_(), scale_format)
    assert torch.equal(served, expected) and torch.equal(trained, expected) and not trained.requires_grad
    columns = round_trip_128x1(x[:1408].t().contiguous().t(), scale_format)
    assert torch.equal(columns, round_trip_1x128(x[:1408].t().contiguous(), scale_format).t())


def test_nan_spoils_only_its_own_group():
    x = torch.ones(1500, 256)
    x[3, 5] = float("nan")
    assert round_trip_1x128(x, "pow2").isnan().nonzero()[:, 0].unique().tolist() == [3]
    assert not round_trip_1x128(x, "pow2")[:, 128:].isnan().any()
