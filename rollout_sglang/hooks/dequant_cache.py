"""Cache of the float values of quantised weights on a CPU: dequantising costs as much as a decoded token's product.

Experts can be many, so the cache holds at most `MAX_CACHED_BYTES`: the weights used first; the rest is dequantised at every use. Evicting
the oldest would never hit, as a model uses its layers in a circle.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_CACHED_BYTES = 2 << 30
"""Limit of one scheduler process: a billion values in BF16 (`value_dtype`), half as many in float32."""

Make = Callable[[], torch.Tensor]
_values: dict[int, tuple[torch.Tensor, torch.Tensor, Make]] = {}
"""(float values, quantised bytes, what made the ones of the others) by the address of the bytes."""
_cached_bytes = 0


def get_float_weight(data: torch.Tensor, make: Make) -> torch.Tensor:
    """Return what `make` gives, the values [N, K] of the weight with these quantised bytes. A model must always ask for the same values."""
    global _cached_bytes
    cached = _values.get(data.data_ptr())
    if cached is not None:
        return cached[0]
    values = make()
    if _cached_bytes + values.nbytes <= MAX_CACHED_BYTES:
        _values[data.data_ptr()] = values, data, make
        _cached_bytes += values.nbytes
    return values


def check_cache(is_proved: Callable[[torch.Tensor], bool]) -> int:
    """Make all values again and compare. Return their number; raise ValueError for stale ones, or bytes that `is_proved` does not know."""
    for values, data, make in _values.values():
        if not is_proved(data) or not torch.equal(values, make()):
            raise ValueError(f"the float values kept of a weight {list(data.shape)} are stale: they are not those of the proved bytes")
    return len(_values)


def clear_cache() -> None:
    """Drop all values. Call it whenever live bytes are written or proved, so that no value outlives the bytes it was made from."""
    global _cached_bytes
    _values.clear()
    _cached_bytes = 0
