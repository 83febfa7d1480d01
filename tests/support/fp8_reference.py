"""Independent references of FP8 numerics: plain loops and the formulas of other libraries."""

import numpy as np
import pytest
import torch

from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.precision.fp8 import quantize_1x128
from parallel.digest import flat_bytes

both_scale_formats = pytest.mark.parametrize("scale_format", ["pow2", "fp32"])


def quantize_128x1(x, scale_format):
    """Return Q_128x1(x) of x `[T, K]`, any T, as (float8_e4m3fn `[T, K]`, float32 scales `[ceil(T/128), K]`)."""
    data, scale = quantize_1x128(x.t(), scale_format)
    return data.t().contiguous(), scale.t().contiguous()


def unpack_scales(packed, groups):
    """Return the float32 scales `[..., rows, groups]` of `precision.ue8m0.pack_scales`, one for each row."""
    exponents = torch.stack([packed >> 8 * byte & 0xFF for byte in range(4)], -1).flatten(-2)[..., :groups]
    return (exponents << 23).view(torch.float32)


def uneven_matrix(rows, cols, seed=0):
    """Return float32 values whose magnitudes differ a lot between rows and columns, so that a wrong block is noticed; some are zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=generator)
    values *= torch.exp(torch.randn(rows, 1, generator=generator)) * torch.exp(torch.randn(cols, generator=generator) * 2)
    return values * (torch.rand(rows, cols, generator=generator) > 0.05)


def uneven(tokens, width, dtype, device="cpu"):
    """Return `[tokens, width]` values with magnitudes from 2^-20 to 2^20, so that a scale of the wrong block is noticed, zeros of both
    signs, and exact rounding ties."""
    generator = torch.Generator().manual_seed(tokens + width)
    values = torch.randn(tokens, width, generator=generator)
    values *= torch.exp2(torch.randint(-20, 20, (tokens, 1), generator=generator).float())
    values[:, ::7] = values[:, ::7].sign() * torch.exp2(values[:, ::7].abs().clamp_min(1e-30).log2().round()) * 1.0625  # ties in E4M3
    values[:, 3::11] = 0.0
    values[:, 5::13] = -0.0
    return values.to(dtype).to(device)


def check_kernel(x, scale_format, groups=None):
    """Check bytes, scales and layouts of `quantize_activation(x)`, and that asking for one half gives the same half."""
    from megatron_rl.kernels.quantize.triton import quantize_activation

    table = None if groups is None else TokenGroups.from_counts(groups, x.device)
    rows, columns = quantize_activation(x, scale_format, rows=True, columns=True, groups=table)
    check_rows(rows, x, scale_format)
    for index, part in enumerate(torch.split(x, list(groups)) if groups else [x]):
        check_columns(_part(columns, x, groups, index), part, scale_format)
    alone, nothing = quantize_activation(x, scale_format, rows=True, columns=False, groups=table)
    assert nothing is None and same_bits(alone, rows)
    nothing, alone = quantize_activation(x, scale_format, rows=False, columns=True, groups=table)
    assert nothing is None and same_bits(alone, columns)


def engine_layouts(x):
    """Return empty E4M3 data `[T, K]` with float32 scales `[T, K/128]`: by rows, by columns, and by columns aligned for TMA."""
    tokens, groups = x.shape[0], x.shape[1] // 128
    scales = [
        x.new_full((tokens, groups), -1, dtype=torch.float32),
        x.new_full((groups, tokens), -1, dtype=torch.float32).t(),
        x.new_full((groups, -(-tokens // 4) * 4), -1, dtype=torch.float32).t()[:tokens],
    ]
    return [(torch.empty_like(x, dtype=torch.float8_e4m3fn), scale) for scale in scales]


def check_rows(rows, x, scale_format):
    """Check data `[T, K]` and scales `[T, K/128]` of Q_1x128(x): T is contiguous, with a stride that is a multiple of 4."""
    assert same_bits(rows, quantize_1x128(x, scale_format))
    assert not len(x) or (rows[0].is_contiguous() and rows[1].stride() == (1, -(-len(x) // 4) * 4))


def check_columns(columns, x, scale_format):
    """Check data `[K, T']` and scales `[K, T'/128]` of Q_128x1(x), transposed. The tokens added to T are zeros."""
    data, scale = quantize_128x1(x, scale_format)
    padding = columns[0].shape[1] - len(x)
    assert 0 <= padding < 128 and not columns[0][:, len(x) :].view(torch.uint8).any()
    assert same_bits((columns[0][:, : len(x)], columns[1]), (data.t(), scale.t()))
    assert columns[0].is_contiguous() and columns[1].stride(0) == 1


def _part(columns, x, groups, index):
    if groups is None:
        return columns
    width, before, length = x.shape[1], sum(groups[:index]), groups[index]
    data = columns[0][before * width :][: length * width].view(width, length)
    return data, columns[1][:, before // 128 : (before + length) // 128]


def same_bits(got, expected):
    """Return whether shapes and bits are equal."""
    return all(a.shape == b.shape and torch.equal(flat_bytes(a), flat_bytes(b)) for a, b in zip(got, expected, strict=True))


_ONE, _LARGEST, _EPSILON = np.float32(1), np.float32(448), np.float32(1e-10)
_EXPONENT, _MANTISSA = np.uint32(0x7F800000), np.uint32(0x007FFFFF)


def transformer_engine_fp32(amax):
    """`compute_scale_from_amax` of recipe_common.cuh (2.20.2), amax_epsilon = 1e-10: a quotient, and its reciprocal for the scale."""
    multiplier = _LARGEST / np.maximum(amax, _EPSILON)
    return _ONE / multiplier, multiplier


def transformer_engine_pow2(amax):
    """The same, with force_pow_2_scales: only the exponent bits of the multiplier are kept."""
    multiplier = (transformer_engine_fp32(amax)[1].view(np.uint32) & _EXPONENT).view(np.float32)
    return _ONE / multiplier, multiplier


def sglang_cuda_fp32(amax):
    """`QuantTrait` of kernels/jit/csrc/gemm/per_token_group_quant.cuh (0.5.23), and `calculate_fp8_scales` of its predecessor
    per_token_group_quant_8bit_v2.cuh: the scale is a product with 1 / 448 as the compiler rounds it."""
    amax = np.maximum(amax, _EPSILON)
    return amax * (_ONE / _LARGEST), _LARGEST / amax


def sglang_cuda_pow2(amax):
    """The ue8m0 branch of the same files, `cast_to_ue8m0` and `fast_log2_ceil`: the exponent of that scale, plus one if its mantissa is
    not 0."""
    bits = sglang_cuda_fp32(amax)[0].view(np.uint32)
    exponent = (bits >> np.uint32(23)) + ((bits & _MANTISSA) != 0)
    return _power(exponent), _power(254 - exponent)


def sglang_triton_fp32(amax):
    """`_per_token_group_quant_8bit` of kernels/ops/quantization/fp8_kernel.py, which runs on AMD GPUs: two quotients."""
    scale = np.maximum(amax, _EPSILON) / _LARGEST
    return scale, _ONE / scale


def _power(biased_exponent):
    return (biased_exponent.astype(np.uint32) << np.uint32(23)).view(np.float32)


COLUMNS, RUN = 1024, 64
_STEP = np.uint64(6364136223846793005)


def run_sums(flat):
    """Return int64 `[runs, 2]` of uint8 `[n]`."""
    raw = flat.numpy().tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 4), dtype="<u4").astype(np.uint64)
    words = np.concatenate([words, np.zeros(-len(words) % (COLUMNS * RUN), dtype=np.uint64)]).reshape(-1, RUN, COLUMNS)
    hashes = np.zeros((len(words), COLUMNS), dtype=np.uint64)
    for row in range(RUN):
        hashes = hashes * _STEP + words[:, row]
    keys = np.array([_key(number) for number in range(2 * COLUMNS)], dtype=np.uint64).reshape(2, COLUMNS)
    sums = np.stack([(hashes * key).sum(1, dtype=np.uint64) for key in keys], axis=1)
    return torch.from_numpy(sums.view(np.int64))


def _key(number):
    """Return an odd SplitMix64 number."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) | 1
