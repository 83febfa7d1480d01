"""INT8 weights and activations as in SGLang's `w8a8_int8`: the quantizer and the emulated product, on any device.

A row, which is one output channel of a weight or one token of its input, with largest magnitude `amax` of at least 1e-10, becomes

    scale = amax / 127        q = round(x * (127 / amax)), ties away from zero        value = q * scale

in the order of operations of `per_token_quant_int8` of SGLang 0.5.23 (sglang/kernels/ops/quantization/int8_kernel.py). The same formula
quantizes weights here, once per sync. On a GPU, Triton's division may be off by an ulp; here it rounds correctly.
"""

from __future__ import annotations

import torch

from megatron_rl.precision.quantized_weight import QuantizedWeight

INT8_MAX = 127.0
_EPSILON = 1e-10
_EXACT_COLUMNS = 1024
"""127 * 127 * 1024 < 2^24: FP32 sums of that many products of INT8 values are exact, whatever their order."""


def row_maxima(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of every row, float32 [..., 1]; NaN where a row holds one."""
    return x.float().abs().amax(-1, keepdim=True)


def quantize_int8_weight(weight: torch.Tensor, amax: torch.Tensor | None = None) -> QuantizedWeight:
    """Quantize [N, K] to INT8 with float32 scales [N, 1]. `amax` [N, 1]: maxima of the whole rows, where `weight` holds
    only some of their columns.

    Raise ValueError where a value is inf or NaN.
    """
    amax = row_maxima(weight) if amax is None else amax
    if not torch.isfinite(amax).all():
        raise ValueError("weight holds inf or NaN")
    values, scale = _quantize_rows(weight, amax)
    return QuantizedWeight(values.to(torch.int8), scale)


def int8_matmul(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return Q(x) . W^T with exact sums, as INT32 accumulation gives, each scaled once in FP32.

    x [..., K] in any float dtype, `values` float32 [N, K] (INT8 numbers), `scale` float32 [N, 1]; returns [..., N] in x's dtype.
    """
    tokens, token_scale = _quantize_rows(x, row_maxima(x))
    parts = zip(tokens.split(_EXACT_COLUMNS, -1), values.split(_EXACT_COLUMNS, -1), strict=True)
    sums = [part @ columns.t() for part, columns in parts]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).double().sum(0).float()
    return (total * (token_scale * scale.t())).to(x.dtype)


def _quantize_rows(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (INT8 numbers as float32 [..., K], scales float32 [..., 1])."""
    amax = amax.clamp_min(_EPSILON)
    limit = torch.full_like(amax, INT8_MAX)  # with a Python number, torch may multiply by a reciprocal and round twice
    return _round_away(x.float() * (limit / amax)), amax / limit


def _round_away(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, ties away from zero, as C's `round` does; torch rounds ties to even. Exact for |value| < 2^22."""
    whole = values.trunc()
    return whole + (values - whole).mul_(2).trunc_()
