"""Block scales that are exact powers of two; those in FP32 are compared with the libraries' in test_library_scales."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from support.golden import slow_fp8

from megatron_rl.precision.fp8 import compute_scales

ALL_POSITIVE_BF16 = (torch.arange(1, 0x7F80, dtype=torch.int32) << 16).view(torch.float32)  # 32639 finite values


def around_the_edges() -> torch.Tensor:
    """448 * 2^k, where one scale ends and the next begins, with their FP32 neighbours; and the same for 256 * 2^k."""
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
