"""Keys and values in E4M3 (`precision.kv`), with scales that are powers of two: the trainer's attention reads q * s, which FP32 and BF16
hold exactly.

`e4m3`: a scale for each token and key-value head, over the head's d numbers. The formula is that of `precision.fp8` with blocks of one
head: s = 2^ceil(log2(amax / 448)), q = e4m3(x / s). The engine stores q and s.

`e4m3_per_layer`: a scale for a layer's keys and one for its values, q = e4m3(x / s) at most 448 in magnitude. The engine stores q and
attends in units of the scales (`to_units`): its queries are times the keys' scale, its output times the values'. Products and sums commute
with a power of two, so these are the trainer's bits.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.precision.contract import E4M3_MAX
from megatron_rl.precision.fp8 import compute_scales, round_to_e4m3_, round_trip_rows
from megatron_rl.precision.threads import all_threads

_EXPONENT = 23
"""Bits below the exponent of an FP32 number; a power of two is its exponent."""
HEADROOM = 2.0
"""A scale is chosen for keys and values that are so many times as large as any that was seen; what is larger still saturates."""


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return round_trip_rows(x.reshape(-1, *x.shape[-2:]), "pow2").to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """Return what attention reads of keys or values [..., heads, d], in their dtype. The gradient passes straight through."""
    return _RoundTrip.apply(x)


def to_units(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return e4m3(x / scale) in x's dtype, which holds it exactly; `scale`: float32 [], a power of two."""
    with all_threads():
        units = (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX)
        return (units.to(torch.float8_e4m3fn) if units.is_cuda else round_to_e4m3_(units)).to(x.dtype)


class _RoundTripWithScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return to_units(x, scale).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def round_trip_with_scale(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return what attention reads of keys or values in units of `scale`, float32 []. The gradient passes straight through."""
    return _RoundTripWithScale.apply(x, scale)


def choose_scales(amax: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the scales for keys and values of largest magnitude `amax`, float32 of any shape: s = 2^ceil(log2(HEADROOM * amax / 448)).
    Where nothing was seen, or something that is no number, the scale is the one `before`."""
    known = (amax > 0) & amax.isfinite()
    return torch.where(known, compute_scales(torch.where(known, amax, 1.0) * HEADROOM, "pow2")[0], before)


def pack(x: torch.Tensor) -> torch.Tensor:
    """Return what the cache stores of [..., d]: uint8 [..., d + 1], the E4M3 bytes and the scale's FP32 exponent."""
    scale, inverse = compute_scales(x.abs().amax(-1, keepdim=True).float(), "pow2")
    data = (x.float() * inverse).to(torch.float8_e4m3fn)
    return torch.cat([data.view(torch.uint8), (scale.view(torch.int32) >> _EXPONENT).to(torch.uint8)], -1)


def unpack(stored: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., d] of `pack`'s uint8 [..., d + 1]; zeros of a slot that was never written."""
    scale = (stored[..., -1:].to(torch.int32) << _EXPONENT).view(torch.float32)
    return stored[..., :-1].view(torch.float8_e4m3fn).float().mul_(scale)
