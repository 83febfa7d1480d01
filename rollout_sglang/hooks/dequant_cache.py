"""Cache of the float values of quantized weights on a CPU, those used first: evicting the oldest would never hit in cyclic use."""

import math
from collections.abc import Callable

import torch

MAX_CACHED_BYTES = 2 << 30  # limit per scheduler process: a billion values in BF16 (`value_dtype`), half as many in float32

Make = Callable[[], torch.Tensor]
_values: dict[int, tuple[torch.Tensor, torch.Tensor, Make]] = {}
"""(float values, quantized bytes, function that makes the values from the bytes) by the address of the bytes."""
_cached_bytes = 0
_next = 0  # number of the values that `check_cache` recomputes next


def get_float_weight(data: torch.Tensor, make: Make) -> torch.Tensor:
    """Return the values `[N, K]` that `make` gives for the weight with these bytes. A model must always ask for the same values."""
    global _cached_bytes
    cached = _values.get(data.data_ptr())
    if cached is not None:
        return cached[0]
    values = make()
    if _cached_bytes + values.nbytes <= MAX_CACHED_BYTES:
        _values[data.data_ptr()] = values, data, make
        _cached_bytes += values.nbytes
    return values


def check_cache(is_proved: Callable[[torch.Tensor], bool], limit: float = math.inf) -> int:
    """Recompute values and compare them, at most `limit` bytes of them or one weight's; the next call goes on with the others. Return the
    number of weights. Raise ValueError if any values are stale or their bytes not proved."""
    global _next
    kept, checked = list(_values.values()), 0
    while checked < len(kept) and (not checked or limit > 0):
        values, data, make = kept[_next % len(kept)]
        if not is_proved(data) or not torch.equal(values, make()):
            cached = f"the cached float values of a weight {list(data.shape)}"
            raise ValueError(f"{cached} are stale: they differ from those of the proved bytes")
        _next, checked, limit = (_next + 1) % len(kept), checked + 1, limit - values.nbytes
    return checked


def find_stale() -> list[tuple[torch.Tensor, int, int]]:
    """Return (bytes, number of stale values, number of values) of every weight whose values are not those that its bytes give now."""
    differing = [(data, int((values != make()).sum()), values.numel()) for values, data, make in _values.values()]
    return [each for each in differing if each[1]]


def clear_cache() -> None:
    """Drop all values. Call it whenever live bytes are written or proved, so that no value outlives the bytes that it was computed from."""
    global _cached_bytes
    _values.clear()
    _cached_bytes = 0
