"""The float values of FP8 and INT8 weights on a CPU, kept between forward passes: dequantising costs as much as a decoded token's product.

Experts can be many, so only `MAX_CACHED_BYTES` bytes are kept, whatever came first; what does not fit is dequantised at every use.
Throwing out
the oldest instead would keep nothing of use, as the layers are walked in a circle.
"""

from __future__ import annotations

import torch

from megatron_rl.precision.fp8 import Fp8Weight, dequantize_weight

MAX_CACHED_BYTES = 2 << 30
"""Bytes of values that a scheduler process keeps: half a billion in float32."""

_kept: dict[int, torch.Tensor] = {}
"""By the address of the bytes they are made from."""
_bytes = 0


def get_float_weight(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[N, K] of a quantised weight: dequantised values of E4M3 bytes (see `megatron_rl.precision.fp8.Fp8Weight`), the bare numbers of INT8
    ones. A model asks for one dtype always."""
    global _bytes
    found = _kept.get(data.data_ptr())
    if found is None:
        found = data.to(dtype) if data.dtype == torch.int8 else dequantize_weight(Fp8Weight(data, scale)).to(dtype)
        if _bytes + found.nbytes <= MAX_CACHED_BYTES:
            _kept[data.data_ptr()] = found
            _bytes += found.nbytes
    return found


def clear_cache() -> None:
    """Drops all values, so that they never outlive the bytes they were made from: called whenever live bytes are written or proved."""
    global _bytes
    _kept.clear()
    _bytes = 0
