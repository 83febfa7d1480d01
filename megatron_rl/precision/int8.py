"""INT8 weights and activations as in SGLang's `w8a8_int8`: the quantizer and the emulated product, on any device.

A row (one output channel of a weight or one token of its input) with largest magnitude `amax`, at least 1e-10, becomes

    scale = amax / 127        q = round(x * (127 / amax)), ties away from zero        value = q * scale

in the order of operations of `per_token_quant_int8` of SGLang 0.5.23 (sglang/kernels/ops/quantization/int8_kernel.py). Weights are
quantized by the same formula, once per sync. On a GPU, Triton's division may be off by one ulp; this one rounds correctly.
"""

import torch

from megatron_rl.precision.quantized_weight import QuantizedWeight

INT8_MAX = 127.0
_EPSILON = 1e-10
_EXACT_COLUMNS = 1024  # FP32 sums of this many products of INT8 values are exact in any order, since 127 * 127 * 1024 < 2^24


def row_maxima(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of every row, float32 `[..., 1]`; NaN for a row with NaN."""
    return x.float().abs().amax(-1, keepdim=True)


def quantize_int8_weight(weight: torch.Tensor, amax: torch.Tensor | None = None) -> QuantizedWeight:
    """Quantize `[N, K]` to INT8 with float32 scales `[N, 1]`. Raise ValueError for inf or NaN. `amax` `[N, 1]` holds the maxima of the
    whole rows, if `weight` has only some of their columns."""
    amax = row_maxima(weight) if amax is None else amax
    if not torch.isfinite(amax).all():
        raise ValueError("weight holds inf or NaN")
    values, scale = _quantize_rows(weight, amax)
    return QuantizedWeight(values.to(torch.int8), scale)


def int8_matmul(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return Q(x) . W^T `[..., N]` in the dtype of x `[..., K]`. Sums are exact, as in INT32 accumulation, and scaled once in FP32.
    `values` float32 `[N, K]` holds INT8 numbers, `scale` is float32 `[N, 1]`."""
    tokens, token_scale = _quantize_rows(x, row_maxima(x))
    parts = zip(tokens.split(_EXACT_COLUMNS, -1), values.split(_EXACT_COLUMNS, -1), strict=True)
    sums = [part @ columns.t() for part, columns in parts]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).double().sum(0).float()
    return (total * (token_scale * scale.t())).to(x.dtype)


def _quantize_rows(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (INT8 numbers as float32 `[..., K]`, scales float32 `[..., 1]`)."""
    amax = amax.clamp_min(_EPSILON)
    limit = torch.full_like(amax, INT8_MAX)  # with a Python number, torch may multiply by a reciprocal and round twice
    return _round_away(x.float() * (limit / amax)), amax / limit


def _round_away(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, ties away from zero like C's `round`; torch rounds ties to even. Exact for |value| < 2^22."""
    whole = values.trunc()
    return whole + (values - whole).mul_(2).trunc_()
