"""Keys and values in E4M3 (`precision.kv`) with power-of-two scales. The trainer's attention reads q * s, which is exact in FP32 and BF16.

`e4m3`: one scale for the d numbers of each token and key-value head, as in `precision.fp8` with blocks of one head:
s = 2^ceil(log2(amax / 448)), q = e4m3(x / s). The engine stores q and s.

`e4m3_per_layer`: one scale for the keys of a layer and one for its values; q = e4m3(x / s), clamped to a magnitude of 448. The engine
stores q and attends in units of the scales (`to_units`): it multiplies queries by the scale of the keys and the output by the scale of the
values. Products and sums commute with powers of two, so its bits equal the trainer's.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.precision.contract import E4M3_MAX
from megatron_rl.precision.fp8 import compute_scales, round_to_e4m3_, round_trip_rows
from megatron_rl.precision.threads import all_threads

_EXPONENT = 23  # position of the exponent in an FP32 number; the other bits of a power of two are 0
HEADROOM = 2.0  # scales are chosen for keys and values this many times as large as the largest seen so far; larger ones saturate


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """Return the values that attention reads of keys or values `[..., heads, d]`, in their dtype. The gradient passes straight through."""
    return _StraightThrough.apply(x, lambda x: round_trip_rows(x.reshape(-1, *x.shape[-2:]), "pow2").to(x.dtype).view(x.shape))


def to_units(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return e4m3(x / scale), exact in the dtype of x. `scale` is a power of two, float32 `[]`."""
    with all_threads():
        units = (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX)
        return (units.to(torch.float8_e4m3fn) if units.is_cuda else round_to_e4m3_(units)).to(x.dtype)


def round_trip_with_scale(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values that attention reads of keys or values with one `scale`, float32 `[]`. The gradient passes straight through."""
    return _StraightThrough.apply(x, lambda x: to_units(x, scale).mul_(scale))


def choose_scales(amax: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the scales s = 2^ceil(log2(HEADROOM * amax / 448)) for keys and values of largest magnitude `amax`, float32 of any shape. If
    `amax` is 0, inf or NaN, keep the scale `before`."""
    known = (amax > 0) & amax.isfinite()
    return torch.where(known, compute_scales(torch.where(known, amax, 1.0) * HEADROOM, "pow2")[0], before)


def pack(x: torch.Tensor) -> torch.Tensor:
    """Return x `[..., d]` as stored in the cache: uint8 `[..., d + 1]`, the E4M3 bytes and the FP32 exponent of the scale."""
    scale, inverse = compute_scales(x.abs().amax(-1, keepdim=True).float(), "pow2")
    data = (x.float() * inverse).to(torch.float8_e4m3fn)
    return torch.cat([data.view(torch.uint8), (scale.view(torch.int32) >> _EXPONENT).to(torch.uint8)], -1)


def unpack(stored: torch.Tensor) -> torch.Tensor:
    """Return float32 `[..., d]` of uint8 `[..., d + 1]` from `pack`; zeros for a slot that was never written."""
    scale = (stored[..., -1:].to(torch.int32) << _EXPONENT).view(torch.float32)
    return stored[..., :-1].view(torch.float8_e4m3fn).float().mul_(scale)
