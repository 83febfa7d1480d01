"""Where Transformer Engine's and SGLang's scales differ: nowhere with powers of two, in known fractions of all block maxima in FP32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import fp8_reference as library

from megatron_rl.precision.fp8 import compute_scales

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
