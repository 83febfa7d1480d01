"""Keys and values in E4M3 (`precision.kv`): one power-of-two scale for each token and key-value head, over the head's d numbers.

The formula is that of `precision.fp8` with blocks of one head: s = 2^ceil(log2(amax / 448)), q = e4m3(x / s). The engine stores q and s,
the trainer's attention reads q * s, which FP32 and BF16 hold exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.precision.fp8 import compute_scales, round_trip_rows

_EXPONENT = 23
"""Bits below the exponent of an FP32 number; a power of two is its exponent."""


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


def pack(x: torch.Tensor) -> torch.Tensor:
    """Return what the cache stores of [..., d]: uint8 [..., d + 1], the E4M3 bytes and the scale's FP32 exponent."""
    scale, inverse = compute_scales(x.abs().amax(-1, keepdim=True).float(), "pow2")
    data = (x.float() * inverse).to(torch.float8_e4m3fn)
    return torch.cat([data.view(torch.uint8), (scale.view(torch.int32) >> _EXPONENT).to(torch.uint8)], -1)


def unpack(stored: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., d] of `pack`'s uint8 [..., d + 1]; zeros of a slot that was never written."""
    scale = (stored[..., -1:].to(torch.int32) << _EXPONENT).view(torch.float32)
    return stored[..., :-1].view(torch.float8_e4m3fn).float().mul_(scale)
