"""Cache of the float values of FP8 and INT8 weights on a CPU: dequantising costs as much as a decoded token's product.

Experts can be many, so the cache holds at most `MAX_CACHED_BYTES`: the weights used first; the rest is dequantised at every use. Evicting
the oldest would never hit, as a model uses its layers in a circle.
"""

from __future__ import annotations

import torch

from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight

MAX_CACHED_BYTES = 2 << 30
"""Limit of one scheduler process: half a billion values in float32."""

_values: dict[int, torch.Tensor] = {}
"""Float values by the address of the quantised bytes."""
_cached_bytes = 0


def get_float_weight(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values [N, K] of a quantised weight: dequantised E4M3 (see `megatron_rl.precision.fp8`), or INT8 numbers without
    their scales. A model must always ask for the same dtype."""
    global _cached_bytes
    values = _values.get(data.data_ptr())
    if values is None:
        values = data.to(dtype) if data.dtype == torch.int8 else dequantize_weight(QuantizedWeight(data, scale)).to(dtype)
        if _cached_bytes + values.nbytes <= MAX_CACHED_BYTES:
            _values[data.data_ptr()] = values
            _cached_bytes += values.nbytes
    return values


def clear_cache() -> None:
    """Drop all values. Call it whenever live bytes are written or proved, so that no value outlives the bytes it was made from."""
    global _cached_bytes
    _values.clear()
    _cached_bytes = 0
