"""Initial values of FP32 masters: random values that round to the number in the checkpoint, instead of the number itself.

A quantized copy Q(m) follows its master m from the first step if masters are uniform over the cells of Q, the intervals that Q rounds to
one value: E[Q(m + d) - Q(m)] = d for any d, since a small d leaves a cell of width L with probability |d| / L, which moves Q by L. The
numbers of a checkpoint are not uniform: one BF16 number in 16 is a tie of E4M3, which the smallest step moves by a whole cell, and FP8
values are in the middle of their cells, so only large steps move a copy. Masters are therefore drawn from the cells by a hash of seed,
tensor, row and column, which is the same in any layout and at any start.

Offsets are added to the bits of a float32, which is exact and stays in the cell: numbers of p bits leave 24 - p low bits free.
docs/reference/precision.md has the mathematics and measurements.
"""

import hashlib

import torch
import torch.nn.functional as F

from megatron_rl.precision.quantized_weight import QuantizedWeight, expand_scales
from megatron_rl.precision.quantizers import QUANTIZERS, quantize
from parallel.formats import TensorFormat
from parallel.shards import Rect

_FREE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float8_e4m3fn: 20, torch.float32: 16}
"""Low bits of a float32 that are 0 for numbers of each dtype. A float32 number with the zeros of a BF16 number counts as BF16: BF16 models
are often stored in float32, and only one other value in 65,536 has these zeros."""
_MANTISSA = 0x7FFFFF


def hash_places(seed: int, tensor: str, rect: Rect, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a uniform hash, int32 `[rows, cols]`, of the seed and of the place of every element in the tensor of the checkpoint."""
    digest = hashlib.blake2b(f"{seed} {tensor}".encode(), digest_size=8).digest()
    row_key, col_key = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    rows = torch.arange(rect.row, rect.row + rect.rows, dtype=torch.int32, device=device)
    cols = torch.arange(rect.col, rect.col + rect.cols, dtype=torch.int32, device=device)
    return _mix(_mix(rows + row_key)[:, None] ^ _mix(cols + col_key))


def spread(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return float32 masters, each uniform over the open interval of reals that round to its number in the checkpoint.

    Zeros are kept, since they are padding or pruned weights. Subnormals of float16 and E4M3 spread over a part of their cell.

    Args:
        values: bfloat16, float16, float8_e4m3fn or float32. A float32 number that is not a BF16 number is its own master.
        places: Result of `hash_places`, int32 of the same shape.
    """
    free = _FREE_BITS[values.dtype]
    bits, half = values.float().view(torch.int32), 1 << (free - 1)
    offset = places >> (32 - free)  # uniform in [-half, half)
    below_one = (offset + half) * 3 // 4 - half // 2  # below a power of two, the cell and the spacing of float32 are half as wide
    offset = torch.where((bits & _MANTISSA) == 0, torch.where(below_one < 0, below_one * 2, below_one), offset).clamp_(min=1 - half)
    stays = ((bits & ((1 << free) - 1)) != 0) | (values == 0)
    return (bits + offset.masked_fill_(stays, 0)).view(torch.float32)


def spread_within_blocks(values: torch.Tensor, places: torch.Tensor, format: TensorFormat) -> torch.Tensor:
    """Return `spread` masters `[N, K]` whose quantized blocks equal those of `values`, bit for bit.

    `values` `[N, K]` must hold whole blocks. The maximum of a block is kept if the scale would change, which is always so with FP32 scales.
    A master beyond an edge of its value's quantized cell is reflected at that edge, so a tie spreads to the side that it rounds to. If the
    reflected master rounds to another number, the value itself is kept.
    """
    exact, masters = values.float(), spread(values, places)
    wanted, got = quantize(exact, format), quantize(masters, format)
    rescaled = expand_scales(wanted.scale != got.scale, format, *values.shape)
    if rescaled.any():
        masters = torch.where(rescaled & _is_block_maximum(exact, format), exact, masters)
        got = quantize(masters, format)
    crossed = wanted.data.view(torch.uint8) != got.data.view(torch.uint8)
    scale = expand_scales(QUANTIZERS[format.name].read_scales(wanted.scale), format, *values.shape).expand_as(exact)[crossed]
    edges_twice = (wanted.data[crossed].float() + got.data[crossed].float()) * scale
    reflected = edges_twice - masters[crossed]
    rounded = reflected.to(torch.float16 if values.dtype is torch.float16 else torch.bfloat16).float()
    masters[crossed] = torch.where(rounded == exact[crossed], reflected, exact[crossed])
    return torch.where(quantize(masters, format).data.view(torch.uint8) == wanted.data.view(torch.uint8), masters, exact)


def spread_blocks(blocks: QuantizedWeight, places: torch.Tensor, format: TensorFormat) -> torch.Tensor:
    """Return float32 masters `[N, K]` for blocks of an FP8 checkpoint, uniform over the cells of the bytes; block maxima are kept."""
    numbers = blocks.data.float()
    masters = torch.where(_is_block_maximum(numbers, format), numbers, spread(blocks.data, places))
    return masters * expand_scales(QUANTIZERS[format.name].read_scales(blocks.scale), format, *masters.shape)


def _is_block_maximum(values: torch.Tensor, format: TensorFormat) -> torch.Tensor:
    """Return whether each element has the largest magnitude of its block: bool `[N, K]`."""
    assert format.block is not None
    block = format.block[0], format.block[1] or values.shape[1]
    maxima = F.max_pool2d(values.abs()[None], block, ceil_mode=True)[0]
    return values.abs() == expand_scales(maxima, format, *values.shape)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 with `lowbias32` (github.com/skeeto/hash-prospector); multiplications wrap."""
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x ^ ((x >> shift) & (0xFFFFFFFF >> shift))) * multiplier
    return x ^ ((x >> 16) & 0xFFFF)
