"""The reference FP8 quantizer: E4M3 values with one FP32 scale per 1x128, 128x1 or 128x128 block.

A block with largest magnitude `amax` gets a scale s (stored as `scale_inv` by Transformer Engine and SGLang: value = q * s):

    pow2   s = 2^ceil(log2(amax / 448))           exact in both libraries
    fp32   s = 1 / fl(448 / amax)                 the order of operations of Transformer Engine (recipe_common.cuh)

The value is q = e4m3(x / s), rounded to nearest even. `amax` is at least `AMAX_EPSILON`.
"""

import torch
import torch.nn.functional as F

from megatron_rl.precision.contract import AMAX_EPSILON, E4M3_MAX
from megatron_rl.precision.quantized_weight import QuantizedWeight, expand_scales
from megatron_rl.precision.threads import run_in_parts
from parallel.formats import BLOCK, FP8

_MANTISSA_CARRY = 0x1FFFFF  # added to FP32 bits, carries into the exponent exactly when the mantissa exceeds 1.75 (448 = 1.75 * 2^8)
_EXPONENT_MASK = 0x7F800000
_EIGHT_BINADES = 8 << 23
_MAGIC = (20 << 23) + (1 << 22)  # added to the bits of a power of two, multiplies it by 1.5 * 2^20
_MAGIC_FACTOR = 1.5 * 2**20
_LARGEST_IN_PLACE = 2.0**100  # above, the magic number overflows. NaN is not below.
_VALUES_IN_CACHE = 1 << 17
_SMALLEST_BINADE = (127 - 6) << 23  # exponent bits of 2^-6, E4M3's smallest normal number


def append_zeros(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Append `count` zeros along `dim`, which is negative. Return x itself if count <= 0, where F.pad would copy."""
    return F.pad(x, (0, 0) * (-1 - dim) + (0, count)) if count > 0 else x


def compute_scales(amax: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale, 1 / scale) in float32 for block maxima `amax`, float32 of any shape."""
    amax = amax.clamp_min(AMAX_EPSILON)
    if scale_format == "pow2":
        bits = ((amax.view(torch.int32) + _MANTISSA_CARRY) & _EXPONENT_MASK) - _EIGHT_BINADES
        scale = bits.view(torch.float32)
        return scale, scale.reciprocal()
    multiplier = torch.full_like(amax, E4M3_MAX) / amax  # `448 / tensor` would multiply by a reciprocal and round twice
    return multiplier.reciprocal(), multiplier


def quantize_weight(weight: torch.Tensor, scale_format: str) -> QuantizedWeight:
    """Quantize `[N, K]` to E4M3 with float32 scales of 128x128 blocks; edge blocks may be partial. Raise ValueError for inf or NaN."""
    rows, cols = weight.shape
    padded = append_zeros(append_zeros(weight.float(), -1, -cols % BLOCK), -2, -rows % BLOCK)
    tiles = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = tiles.abs().amax(dim=(1, 3))
    if not torch.isfinite(amax).all():
        raise ValueError("weight holds inf or NaN")
    scale, inverse = compute_scales(amax, scale_format)
    data = (tiles * inverse[:, None, :, None]).view(padded.shape)[:rows, :cols].to(torch.float8_e4m3fn)
    return QuantizedWeight(data.contiguous(), scale)


def dequantize_weight(blocks: QuantizedWeight) -> torch.Tensor:
    """Return float32 `[N, K]`: data times the scale of its block."""
    return blocks.data.float() * expand_scales(blocks.scale, FP8, *blocks.data.shape)


def quantize_1x128(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q_1x128(x) of x `[T, K]`, any K, as (float8_e4m3fn `[T, K]`, float32 scales `[T, ceil(K/128)]`)."""
    groups = append_zeros(x.float(), -1, -x.shape[1] % BLOCK).unflatten(1, (-1, BLOCK))
    scale, inverse = compute_scales(groups.abs().amax(2), scale_format)
    data = (groups * inverse[..., None]).flatten(1)[:, : x.shape[1]].to(torch.float8_e4m3fn)
    return data.contiguous(), scale


def round_trip_1x128(x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return the float32 values of Q_1x128(x), with groups of 128 along the last dimension of x `[..., K]`, any K."""
    length = x.shape[-1]
    groups = append_zeros(x.reshape(-1, length), -1, -length % BLOCK).unflatten(-1, (-1, BLOCK))
    return _round_trip(groups, -1, scale_format).flatten(-2)[..., :length].reshape(x.shape)


def round_trip_128x1(x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return the float32 values of Q_128x1(x), with groups of 128 along the first dimension of x `[T, K]`, any T."""
    values, whole = torch.empty(x.shape, device=x.device), len(x) // BLOCK * BLOCK
    _round_trip(x[:whole].unflatten(0, (-1, BLOCK)), 1, scale_format, values[:whole].unflatten(0, (-1, BLOCK)))
    if whole < len(x):
        _round_trip(x[None, whole:], 1, scale_format, values[None, whole:])  # zeros would not change the largest magnitude
    return values


def round_trip_rows(x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return the float32 values of x `[T, H, K]` quantized with one scale per row of K numbers."""
    return _round_trip(x, -1, scale_format)


def round_to_e4m3_(values: torch.Tensor) -> torch.Tensor:
    """Round float32 `values` of magnitude at most 448 in place to the nearest E4M3 number, ties to even, like a cast to E4M3 and back.

    Adding and subtracting 1.5 * 2^23 quanta makes FP32 addition round to that quantum: 2^-3 of the value's binade, or 2^-9 for subnormals
    (below 2^-6). This is several times faster on a CPU than torch's float8 casts.
    """
    binade = (values.view(torch.int32) & _EXPONENT_MASK).clamp_(min=_SMALLEST_BINADE)
    magic = binade.add_(_MAGIC).view(torch.float32)
    return values.add_(magic).sub_(magic)


def _round_trip(groups: torch.Tensor, dim: int, scale_format: str, values: torch.Tensor | None = None) -> torch.Tensor:
    """Return the quantized float32 values of 3-dimensional `groups` along `dim`, in `values` if given; on a CPU, in parts that fit in a
    core's cache."""
    values = torch.empty_like(groups, dtype=torch.float32) if values is None else values
    if groups.is_cuda:
        _round_trip_part(groups, dim, scale_format, values)
        return values
    rows = max(1, _VALUES_IN_CACHE // max(groups[:1].numel(), 1))

    def quantize(own: slice) -> None:
        for part, into in zip(groups[own].split(rows), values[own].split(rows), strict=True):
            _round_trip_part(part, dim, scale_format, into)

    run_in_parts(quantize, len(groups), rows)  # the bits do not depend on threads: every operation is exact or rounds once
    return values


def _round_trip_part(part: torch.Tensor, dim: int, scale_format: str, into: torch.Tensor) -> None:
    amax = part.abs().amax(dim, keepdim=True).float()
    scale, inverse = compute_scales(amax, scale_format)
    if scale_format == "pow2" and part.dtype == torch.float32 and not part.is_cuda and bool((amax < _LARGEST_IN_PLACE).all()):
        _round_in_place(part, scale, into)
    else:
        round_to_e4m3_(torch.mul(part, inverse, out=into)).mul_(scale)


def _round_in_place(part: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> None:
    """Write the quantized values of `part` to `into` without scaling them: a power of two moves the quanta and changes no digit. The sums
    of `round_to_e4m3_` with fewer passes; `alpha` times a power of two is exact."""
    smallest = scale.view(torch.int32) - (6 << 23)  # E4M3's smallest binade times the scale
    binade = torch.bitwise_and(part.view(torch.int32), _EXPONENT_MASK)
    magic = torch.maximum(binade, smallest, out=binade).view(torch.float32)
    torch.add(part, magic, alpha=_MAGIC_FACTOR, out=into).sub_(magic, alpha=_MAGIC_FACTOR)
