"""How Transformer Engine and SGLang make a block's scale, operation by operation, each library's formula under its own name.

Every reference maps block maxima, float32 as numpy holds them, to (scale as it is stored, multiplier that x is quantised with), both
float32 and every operation rounded once. None shares code with `megatron_rl.precision.fp8`.

What cannot be known here is left out: SGLang's CUDA kernels are compiled with --use_fast_math, so their FP32 multiplier 448 / amax is
an approximate division (two units in the last place at most), and so is every division of a Triton kernel on a GPU; the correctly
rounded quotient stands for both. SGLang's CPU quantiser is C++ of a package for Intel's AMX that PyPI does not have.
"""

from __future__ import annotations

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Scales = tuple[FloatArray, FloatArray]

_ONE, _LARGEST, _EPSILON = np.float32(1), np.float32(448), np.float32(1e-10)
_EXPONENT, _MANTISSA = np.uint32(0x7F800000), np.uint32(0x007FFFFF)


def transformer_engine_fp32(amax: FloatArray) -> Scales:
    """`compute_scale_from_amax` of recipe_common.cuh (2.20.2), amax_epsilon = 1e-10: a quotient, and its reciprocal for the scale."""
    multiplier = _LARGEST / np.maximum(amax, _EPSILON)
    return _ONE / multiplier, multiplier


def transformer_engine_pow2(amax: FloatArray) -> Scales:
    """The same, with force_pow_2_scales: only the exponent bits of the multiplier are kept."""
    multiplier = (transformer_engine_fp32(amax)[1].view(np.uint32) & _EXPONENT).view(np.float32)
    return _ONE / multiplier, multiplier


def sglang_cuda_fp32(amax: FloatArray) -> Scales:
    """`QuantTrait` of kernels/jit/csrc/gemm/per_token_group_quant.cuh (0.5.23), and `calculate_fp8_scales` of its predecessor
    per_token_group_quant_8bit_v2.cuh: the scale is a product with 1 / 448 as the compiler rounds it."""
    amax = np.maximum(amax, _EPSILON)
    return amax * (_ONE / _LARGEST), _LARGEST / amax


def sglang_cuda_pow2(amax: FloatArray) -> Scales:
    """The same files' ue8m0 branch, `cast_to_ue8m0` and `fast_log2_ceil`: that scale's exponent, one more where its mantissa is not 0."""
    bits = sglang_cuda_fp32(amax)[0].view(np.uint32)
    exponent = (bits >> np.uint32(23)) + ((bits & _MANTISSA) != 0)
    return _power(exponent), _power(254 - exponent)


def sglang_triton_fp32(amax: FloatArray) -> Scales:
    """`_per_token_group_quant_8bit` of kernels/ops/quantization/fp8_kernel.py, which runs on AMD GPUs: two quotients."""
    scale = np.maximum(amax, _EPSILON) / _LARGEST
    return scale, _ONE / scale


def _power(biased_exponent: FloatArray) -> FloatArray:
    return (biased_exponent.astype(np.uint32) << np.uint32(23)).view(np.float32)
