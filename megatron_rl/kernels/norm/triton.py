"""The Triton kernels of `kernels.norm.reference`: RMSNorm that quantizes its result, and the gradient of RMSNorm.

Sum and result are rounded to the dtype of x, so bytes, scales and layouts equal those of `kernels.quantize.triton` for the result. The
kernel that holds a whole token writes the rows. Columns need 128 tokens, too many for one program, so a second kernel computes them from
the sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.quantize.triton import (
    LAUNCH,
    QuantizedPair,
    _e4m3_bytes,
    _scale_and_inverse,
    _store_columns,
    allocate,
    choose_launch,
)
from megatron_rl.precision.contract import AMAX_EPSILON, E4M3_MAX
from parallel.formats import BLOCK

_TOKENS = 16  # tokens of a program, which accumulates its part of the gradient of the weight in registers


@triton.jit
def differentiate_norm_rows(
    gradient, total, statistic, weight, of_total, result, of_weight, tokens, width, ADDS: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):  # fmt: skip
    """One program for TOKENS tokens of [tokens, width]; `of_weight` float32 [programs, width]."""
    first, column = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, WIDTH_TILE)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    sums = tl.zeros([WIDTH_TILE], tl.float32)
    for token in range(first, min(first + TOKENS, tokens)):
        at, inside = token * width + column, column < width
        scale = tl.load(statistic + token)
        dy = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        normalized = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * scale
        sums += dy * normalized
        weighted = dy * w
        mean = tl.sum(weighted * normalized, axis=0) / width
        dx = (scale * (weighted - normalized * mean)).to(result.dtype.element_ty)
        if ADDS:
            others = tl.load(of_total + at, mask=inside, other=0.0).to(tl.float32)
            dx = (dx.to(tl.float32) + others).to(result.dtype.element_ty)
        tl.store(result + at, dx, mask=inside)
    tl.store(of_weight + tl.program_id(0).to(tl.int64) * width + column, sums, mask=column < width)


def differentiate(
    gradient: torch.Tensor, total: torch.Tensor, statistic: torch.Tensor, weight: torch.Tensor, of_total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.norm.reference.differentiate`. Raise ValueError if shapes do not match."""
    tokens, width = statistic.numel(), total.shape[-1]
    if gradient.shape != total.shape or statistic.shape != total.shape[:-1] or (of_total is not None and of_total.shape != total.shape):
        raise ValueError(f"total {list(total.shape)}, its gradient and the gradient of its norm {list(gradient.shape)} do not match")
    programs = triton.cdiv(tokens, _TOKENS)
    result = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    of_weight = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    if tokens:
        differentiate_norm_rows[(programs,)](
            gradient.contiguous(), total, statistic, weight,
            torch.empty(0, device=total.device) if of_total is None else of_total.contiguous(), result, of_weight, tokens, width,
            ADDS=of_total is not None, TOKENS=_TOKENS, **choose_launch(width),
        )  # fmt: skip
    return result, of_weight.sum(0).to(weight.dtype)


@triton.jit
def _normalize(values, scale, weight, inside, dtype: tl.constexpr):
    """Return the result rounded to `dtype`, as float32; +0 in padding."""
    return tl.where(inside, (values * scale * weight).to(dtype).to(tl.float32), 0.0)


@triton.jit
def normalize_row(
    x, residual, weight, total, statistic, row_data, row_scale, tokens, width, row_scale_stride, eps, ADDS: tl.constexpr,
    POW2: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr, WIDTH_TILE: tl.constexpr,
):  # fmt: skip
    """One program per token of x [tokens, width] and per padding row."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE)
    at, is_there = token * width + column, token < tokens
    inside = (column < width) & is_there
    stream = tl.load(x + at, mask=inside, other=0.0)
    if ADDS:
        stream = (stream.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, stream, mask=inside)
    values = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    tl.store(statistic + token, scale, mask=is_there)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = _normalize(values, scale, w, inside, x.dtype.element_ty)
    normed = tl.reshape(normed, (WIDTH_TILE // TILE, TILE))
    scales, inverse = _scale_and_inverse(tl.max(tl.abs(normed), axis=1), POW2, EPSILON, LARGEST)
    block, of_block = tl.arange(0, WIDTH_TILE // TILE), tl.arange(0, TILE)
    target = row_data + token * width + block[:, None] * TILE + of_block[None, :]
    tl.store(target, _e4m3_bytes(normed * inverse[:, None]), mask=(block * TILE < width)[:, None])
    tl.store(row_scale + block * row_scale_stride + token, scales, mask=block * TILE < width)


@triton.jit
def quantize_normed_tile(
    total, statistic, weight, column_data, column_scale, tokens, padded_tokens, width, POW2: tl.constexpr, EPSILON: tl.constexpr,
    LARGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per 128x128 tile of total [tokens, width]."""
    token_tile, column_tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token, column = token_tile * TILE + tl.arange(0, TILE), column_tile * TILE + tl.arange(0, TILE)
    inside = token < tokens
    values = tl.load(total + token[:, None] * width + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    scale, w = tl.load(statistic + token, mask=inside, other=0.0), tl.load(weight + column).to(tl.float32)
    normed = _normalize(values, scale[:, None], w[None, :], inside[:, None], total.dtype.element_ty)
    _store_columns(
        normed, column_data, column_scale, column_scale, column_scale, token, token_tile, column_tile, padded_tokens, width, POW2, False,
        EPSILON, LARGEST, TILE,
    )  # fmt: skip


def quantize_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, scale_format: str, *, columns: bool, **multiples: int
) -> tuple[torch.Tensor, torch.Tensor, QuantizedPair, QuantizedPair | None]:
    """Return (total `[..., h]`, statistic float32 `[...]`, rows, columns or None) for x `[..., h]`; names as in `kernels.norm.reference`.
    `multiples` are arguments of `allocate`. Raise ValueError if h is not a multiple of 128 or the shapes do not match."""
    tokens, width = x.shape[:-1].numel(), x.shape[-1]
    if width % BLOCK or weight.shape != (width,) or (residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype)):
        raise ValueError(f"x {list(x.shape)}: the width must be a multiple of {BLOCK}, and residual and weight must match x")
    x = x.contiguous()
    total = x if residual is None else torch.empty_like(x)
    statistic = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, column_pair = allocate(tokens, width, x.device, rows=True, columns=columns, **multiples)
    assert rows is not None
    unused = torch.empty(0, dtype=torch.uint8, device=x.device)
    formula: Any = {"POW2": scale_format == "pow2", "EPSILON": AMAX_EPSILON, "LARGEST": E4M3_MAX, "TILE": BLOCK}
    if tokens:
        normalize_row[(len(rows[0]),)](
            x, unused if residual is None else residual.contiguous(), weight, unused if residual is None else total, statistic,
            rows[0].view(torch.uint8), rows[1], tokens, width, rows[1].stride(1), eps, ADDS=residual is not None, **formula,
            **choose_launch(width),
        )  # fmt: skip
    if tokens and column_pair is not None:
        data, scale = column_pair
        quantize_normed_tile[(triton.cdiv(tokens, BLOCK), width // BLOCK)](
            total, statistic, weight, data.view(torch.uint8), scale, tokens, data.shape[1], width, **formula, **LAUNCH
        )
    return total, statistic, rows, column_pair
