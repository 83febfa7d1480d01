"""The Triton kernel of `kernels.cache_units.reference`."""

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.quantize.triton import LAUNCH, ROW_COLUMNS, _e4m3_bytes
from megatron_rl.precision.contract import E4M3_MAX


@triton.jit
def _to_units(x, scale, LARGEST: tl.constexpr):
    units = tl.clamp(tl.div_rn(x, tl.zeros(x.shape, tl.float32) + scale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return _e4m3_bytes(units).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def enter_units_row(
    query, key, value, scales, of_query, of_key, of_value, width, key_width, stride, key_stride, value_stride, LARGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for COLUMNS columns of a token of query [t, width], key and value [t, key_width], whose rows are strides apart."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    key_scale, value_scale = tl.load(scales), tl.load(scales + 1)
    x = tl.load(query + token * stride + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(of_query + token * width + column, (x * key_scale).to(of_query.dtype.element_ty), mask=column < width)
    inside, at = column < key_width, token * key_width + column
    k = tl.load(key + token * key_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(of_key + at, _to_units(k, key_scale, LARGEST).to(of_key.dtype.element_ty), mask=inside)
    v = tl.load(value + token * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(of_value + at, _to_units(v, value_scale, LARGEST).to(of_value.dtype.element_ty), mask=inside)


def enter_units(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `kernels.cache_units.reference.enter_units`; results are contiguous."""
    parts = query.flatten(1), key.flatten(1), value.flatten(1)
    of_query, of_key, of_value = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value))
    if len(query):
        width, key_width = parts[0].shape[1], parts[1].shape[1]
        enter_units_row[(len(query), triton.cdiv(max(width, key_width), ROW_COLUMNS))](
            *parts, scales, of_query, of_key, of_value, width, key_width, *(each.stride(0) for each in parts),
            LARGEST=E4M3_MAX, COLUMNS=ROW_COLUMNS, **LAUNCH,
        )  # fmt: skip
    return of_query, of_key, of_value
