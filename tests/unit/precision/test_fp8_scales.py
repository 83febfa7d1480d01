"""Block scales: exact powers of two, and where Transformer Engine and SGLang differ in FP32."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from support import fp8_reference as library
from support.golden import slow_fp8

from megatron_rl.precision.fp8 import compute_scales

ALL_POSITIVE_BF16 = (torch.arange(1, 0x7F80, dtype=torch.int32) << 16).view(torch.float32)  # 32639 finite values


def around_the_edges() -> torch.Tensor:
    """448 * 2^k, where one scale ends and the next begins, with their FP32 neighbors; and the same for 256 * 2^k."""
    edges = np.array([m * 2.0**k for m in (448, 256) for k in range(-40, 116)], np.float32)
    return torch.from_numpy(np.concatenate([np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(np.inf))]))


@pytest.mark.parametrize("amax", [ALL_POSITIVE_BF16, around_the_edges()], ids=["every bf16", "edges of binades"])
def test_pow2_is_exactly_the_smallest_power_of_two_that_fits(amax):
    scale, inverse = compute_scales(amax, "pow2")
    for value, got in zip(amax.tolist(), scale.tolist(), strict=True):
        value = max(value, float(np.float32(1e-10)))
        assert Fraction(value) <= 448 * Fraction(got), f"amax {value!r} does not fit under scale {got!r}"
        assert Fraction(value) > 224 * Fraction(got), f"amax {value!r} would fit under half the scale {got!r}"
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert (scale * inverse == 1).all()


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1.1754944e-38, 1e-11, 1e-10])
def test_tiny_blocks_count_as_the_epsilon(amax):
    assert compute_scales(torch.tensor(amax), "pow2")[0].item() == 2.0**-42
    assert compute_scales(torch.tensor(amax), "fp32")[1].item() == np.float32(448) / np.float32(1e-10)


def test_the_slow_reference_agrees_with_known_values():
    """The reference the other tests lean on, against numbers of the format's specification."""
    assert slow_fp8.VALUES[[0, 1, 7, 8, 56, 126]].tolist() == [0, 2**-9, 7 * 2**-9, 2**-6, 1.0, 448]
    assert slow_fp8.to_codes(np.array([1.0, -1.0, 448.0, 1e9, 0.0, -0.0, 2**-10, 3 * 2**-10])).tolist() == [56, 184, 126, 126, 0, 128, 0, 2]
    assert [slow_fp8.scale_exponent(value) for value in (448.0, 448.00003, 224.0, 1.0)] == [0, 1, -1, -8]


ALL_BF16 = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)  # zero, the subnormals and every finite value above
CLAMPED = np.count_nonzero(np.less(ALL_BF16, np.float32(1e-10)))
ONE_BINADE = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
"""Every mantissa of FP32. Powers of two scale every formula exactly, as long as nothing is clamped."""


def contract_scales(amax: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    scale, multiplier = compute_scales(torch.from_numpy(amax), scale_format)
    return scale.numpy(), multiplier.numpy()


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Steps between positive FP32 values."""
    return np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32))


@pytest.mark.parametrize(
    "formula, scale_format",
    [(library.transformer_engine_pow2, "pow2"), (library.sglang_cuda_pow2, "pow2"), (library.transformer_engine_fp32, "fp32")],
)
@pytest.mark.parametrize("amax", [ALL_BF16, ONE_BINADE], ids=["every bf16", "every mantissa"])
def test_no_power_of_two_scale_differs_and_no_fp32_scale_from_transformer_engines(formula, scale_format, amax):
    for scales, contract in zip(formula(amax), contract_scales(amax, scale_format), strict=True):
        assert np.array_equal(scales, contract)


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


def test_what_is_clamped_differs_by_one_step_in_sglangs_kernel_alone():
    """A block of zeros: the stored FP32 scale, which multiplies nothing but zeros."""
    zero = np.zeros(1, np.float32)
    expected = library.transformer_engine_fp32(zero)[0]
    assert ulps(library.sglang_cuda_fp32(zero)[0], expected) == 1 and ulps(library.sglang_triton_fp32(zero)[0], expected) == 0
    assert library.transformer_engine_pow2(zero)[0] == library.sglang_cuda_pow2(zero)[0] == 2.0**-42
