"""The dequantised values of FP8 weights on a CPU, kept between forward passes: dequantising costs as much as a decoded token's product.

Experts can be many, so only `LIMIT` bytes are kept, whatever came first; what does not fit is dequantised at every use. Throwing out
the oldest instead would keep nothing of use, as the layers are walked in a circle.
"""

from __future__ import annotations

import torch

from megatron_rl.fp8.quantize import Blocks, dequantize_weight

LIMIT = 2 << 30
"""Bytes of float32 values that a scheduler process keeps: those of half a billion FP8 weights."""

_kept: dict[int, torch.Tensor] = {}
"""By the address of their E4M3 bytes."""
_bytes = 0


def values_of(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] of an FP8 weight: E4M3 bytes [N, K] and scales as in `megatron_rl.fp8.quantize.Blocks`."""
    global _bytes
    found = _kept.get(data.data_ptr())
    if found is None:
        found = dequantize_weight(Blocks(data, scale))
        if _bytes + found.nbytes <= LIMIT:
            _kept[data.data_ptr()] = found
            _bytes += found.nbytes
    return found


def forget() -> None:
    """Drops all values, so that they never outlive the bytes they were made from: called whenever live bytes are written or proved."""
    global _bytes
    _kept.clear()
    _bytes = 0
