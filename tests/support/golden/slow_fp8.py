"""A slow implementation of E4M3 and its block scales from their definitions, with numpy and exact fractions and none of the project's
code."""

from fractions import Fraction

import numpy as np

LARGEST, SMALLEST_AMAX = 448, np.float32(1e-10)
BLOCK = 128


def _value_of(code):
    """OCP E4M3: 4 exponent bits with bias 7, 3 mantissa bits, exponent 0 for subnormals; code 127 would be NaN."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


VALUES = np.array([_value_of(code) for code in range(127)])
"""float64 [127]: every non-negative finite E4M3 number, in order; the index is the byte."""


def to_codes(values):
    """Return the E4M3 bytes nearest to `values`, with ties to the even byte, saturating; zeros keep their sign."""
    size = np.abs(values.astype(np.float64))
    above = np.searchsorted(VALUES, size).clip(1, 126)
    below = above - 1
    gap_down, gap_up = size - VALUES[below], VALUES[above] - size
    code = np.where(gap_up < gap_down, above, np.where(gap_down < gap_up, below, np.where(above % 2, below, above)))
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def from_codes(codes):
    """Return the float64 values of E4M3 bytes."""
    return np.where(codes & 128, -1.0, 1.0) * VALUES[codes & 127]


def scale_exponent(amax):
    """Return the smallest e with amax <= 448 * 2^e, by exact comparison: ceil(log2(amax / 448))."""
    exponent = int(np.floor(np.log2(amax / LARGEST))) - 1  # certainly too small
    while Fraction(amax) > LARGEST * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def scale_of(amax, scale_format):
    """Return (scale, multiplier) of a block as float32."""
    amax = np.float32(max(np.float32(amax), SMALLEST_AMAX))
    if scale_format == "pow2":
        exponent = scale_exponent(float(amax))
        return np.float32(2.0**exponent), np.float32(2.0**-exponent)
    multiplier = np.float32(LARGEST) / amax  # Transformer Engine: fl(448 / amax) first, then its reciprocal
    return np.float32(1) / multiplier, multiplier


def quantize(block, scale_format):
    """Return (bytes, scale) of one float32 block of any shape."""
    scale, multiplier = scale_of(np.abs(block).max(), scale_format)
    return to_codes(block.astype(np.float32) * multiplier), scale


def round_trip(block, scale_format):
    """Return the float32 values that a block's bytes and scale represent."""
    codes, scale = quantize(block, scale_format)
    return from_codes(codes).astype(np.float32) * scale


def round_trip_rows(x, scale_format):
    """Return Q_1x128 of a matrix `[M, K]`: runs of 128 along each row."""
    result = np.empty(x.shape, np.float32)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], BLOCK):
            group = np.s_[row, start : start + BLOCK]
            result[group] = round_trip(x[group], scale_format)
    return result


def quantize_matrix(weight, scale_format):
    """Return (bytes `[N, K]`, scales `[ceil(N/128), ceil(K/128)]`) of a weight, block by block."""
    codes = np.empty(weight.shape, np.uint8)
    scales = np.empty((-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            codes[tile], scales[i, j] = quantize(weight[tile], scale_format)
    return codes, scales


def multiply(weight, x, dy, scale_format):
    """Return the float64 operands (left, right) of FProp, DGrad and WGrad: rows of tokens with blocks of the weight `[N, K]`, the same
    blocks transposed, and runs along the tokens."""
    codes, scales = quantize_matrix(weight, scale_format)
    blocks = from_codes(codes) * np.kron(scales.astype(np.float64), np.ones((BLOCK, BLOCK)))[: len(weight), : weight.shape[1]]
    rows, columns = ([round_trip_rows(np.ascontiguousarray(each), scale_format) for each in pair] for pair in ((x, dy), (x.T, dy.T)))
    operands = (rows[0], blocks.T), (rows[1], blocks), (columns[1], columns[0].T)
    return [(left.astype(np.float64), right.astype(np.float64)) for left, right in operands]


def assert_product(got, left, right):
    """Check that `got` is `left @ right` up to the rounding of FP32 sums, which is far below one FP8 step of any term."""
    assert got.shape == (len(left), right.shape[1])
    error = np.abs(got.double().numpy() - left @ right)
    assert (error <= 2e-6 * (np.abs(left) @ np.abs(right)) + 1e-30).all(), f"largest error {error.max()}"
