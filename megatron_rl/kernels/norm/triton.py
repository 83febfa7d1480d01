"""The Triton kernels of `kernels.norm.reference`: RMSNorm, RMSNorm that quantizes its result, and the gradient of RMSNorm.

Sum and result are rounded to the dtype of x, so bytes, scales and layouts equal those of `kernels.quantize.triton` for the result. The
kernel that holds a whole token writes the rows. Columns need 128 tokens, too many for one program, so a second kernel computes them from
the sum.

What is normalized without quantization may be the heads of a slice of a fused projection: neither the norm nor its gradient copies it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.quantize.triton import (
    LAUNCH,
    QuantizedPair,
    _e4m3_bytes,
    _number_tokens,
    _scale_and_inverse,
    _store_columns,
    align,
    allocate,
    choose_launch,
)
from megatron_rl.kernels.sums.triton import add_rows
from megatron_rl.precision.contract import AMAX_EPSILON, E4M3_MAX
from parallel.formats import BLOCK

_TOKENS = 16  # tokens of a program, which accumulates its part of the gradient of the weight in registers
_NUMBERS = 2048  # numbers of a program that normalizes short rows


def choose_tile(width: int) -> dict[str, Any]:
    """Return the constants of a program that normalizes rows. All kernels that normalize take them, so that they add in one order."""
    options = choose_launch(width)
    return {"ROWS": max(1, _NUMBERS // int(options["WIDTH_TILE"])), **options}


@triton.jit
def differentiate_norm_rows(
    gradient, total, statistic, weight, of_total, result, of_weight, tokens, width, heads, token_stride, head_stride, ADDS: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH_TILE: tl.constexpr,
):  # fmt: skip
    """One program for TOKENS rows of [tokens, width]; `total` is [tokens / heads, heads, width] of two strides, and `of_weight` float32
    [programs, width]."""
    first, column = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, WIDTH_TILE)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    sums = tl.zeros([WIDTH_TILE], tl.float32)
    for token in range(first, min(first + TOKENS, tokens)):
        at, inside = token * width + column, column < width
        source = total + token // heads * token_stride + token % heads * head_stride + column
        scale = tl.load(statistic + token)
        dy = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        normalized = tl.load(source, mask=inside, other=0.0).to(tl.float32) * scale
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
    programs, view = triton.cdiv(tokens, _TOKENS), _view_heads(total)
    result = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    of_weight = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    if tokens:
        differentiate_norm_rows[(programs,)](
            gradient.contiguous(), view, statistic, weight,
            torch.empty(0, device=total.device) if of_total is None else of_total.contiguous(), result, of_weight, tokens, width,
            view.shape[1], *view.stride()[:2], ADDS=of_total is not None, TOKENS=_TOKENS, **choose_launch(width),
        )  # fmt: skip
    return result, add_rows(of_weight, weight.dtype)


def _view_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x `[..., width]` as `[rows, heads, width]` whose numbers in a row are adjacent: a view, unless its strides need a copy."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, 1, x.shape[-1]) if x.is_contiguous() or x.dim() < 3 else x.flatten(0, -3)


@triton.jit(do_not_specialize=["rows"])
def normalize_rows(
    x, residual, weight, total, statistic, result, rows, width, heads, token_stride, head_stride, eps, ADDS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH_TILE: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows of [rows, width]; x is [rows / heads, heads, width] of two strides."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_TILE)
    at, inside = row[:, None] * width + column[None, :], (row < rows)[:, None] & (column < width)[None, :]
    source = x + (row // heads * token_stride + row % heads * head_stride)[:, None] + column[None, :]
    stream = tl.load(source, mask=inside, other=0.0)
    if ADDS:
        stream = (stream.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, stream, mask=inside)
    values = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / width + eps)
    tl.store(statistic + row, scale, mask=row < rows)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(result + at, (values * scale[:, None] * w[None, :]).to(result.dtype.element_ty), mask=inside)


def normalize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `kernels.norm.reference.normalize`. Raise ValueError if shapes do not match."""
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    if weight.shape != (width,) or (residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype)):
        raise ValueError(f"x {list(x.shape)}: residual and weight {list(weight.shape)} must match x")
    view, options = align(_view_heads(x)), choose_tile(width)
    result, statistic = x.new_empty(x.shape), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    total, unused = x if residual is None else torch.empty_like(result), torch.empty(0, dtype=torch.uint8, device=x.device)
    if rows:
        normalize_rows[(triton.cdiv(rows, options["ROWS"]),)](
            view, unused if residual is None else align(residual.contiguous()), align(weight), unused if residual is None else total,
            statistic, result, rows, width, view.shape[1], *view.stride()[:2], eps, ADDS=residual is not None, **options,
        )  # fmt: skip
    return total, statistic, result


@triton.jit
def _normalize(values, scale, weight, inside, dtype: tl.constexpr):
    """Return the result rounded to `dtype`, as float32; +0 in padding."""
    return tl.where(inside, (values * scale * weight).to(dtype).to(tl.float32), 0.0)


@triton.jit(do_not_specialize=["tokens", "padded_tokens", "row_scale_stride"])
def normalize_row(
    x, residual, weight, total, statistic, result, row_data, row_scale, tokens, padded_tokens, width, row_scale_stride, eps,
    ADDS: tl.constexpr, STORES: tl.constexpr, POW2: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH_TILE: tl.constexpr,
):  # fmt: skip
    """One program for ROWS tokens of x [tokens, width], padding rows included. With STORES, it also writes the norm itself."""
    token, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_TILE)
    at, is_there = token[:, None] * width + column[None, :], token < tokens
    inside = is_there[:, None] & (column < width)[None, :]
    stream = tl.load(x + at, mask=inside, other=0.0)
    if ADDS:
        stream = (stream.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, stream, mask=inside)
    values = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / width + eps)
    tl.store(statistic + token, scale, mask=is_there)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = _normalize(values, scale[:, None], w[None, :], inside, x.dtype.element_ty)
    if STORES:
        tl.store(result + at, normed.to(x.dtype.element_ty), mask=inside)
    normed = tl.reshape(normed, (ROWS, WIDTH_TILE // TILE, TILE))
    scales, inverse = _scale_and_inverse(tl.max(tl.abs(normed), axis=2), POW2, EPSILON, LARGEST)
    block, of_block = tl.arange(0, WIDTH_TILE // TILE), tl.arange(0, TILE)
    stored = (token < padded_tokens)[:, None] & (block * TILE < width)[None, :]
    target = row_data + (token[:, None] * width + (block * TILE)[None, :])[:, :, None] + of_block[None, None, :]
    tl.store(target, _e4m3_bytes(normed * inverse[:, :, None]), mask=stored[:, :, None])
    tl.store(row_scale + (block * row_scale_stride)[None, :] + token[:, None], scales, mask=stored)


@triton.jit
def quantize_normed_tile(
    total, statistic, weight, column_data, column_scale, tokens, padded_tokens, width, POW2: tl.constexpr, EPSILON: tl.constexpr,
    LARGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per 128x128 tile of total [tokens, width]."""
    token_tile, column_tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token, column = _number_tokens(token_tile * TILE, TILE), column_tile * TILE + tl.arange(0, TILE)
    inside = token < tokens
    values = tl.load(total + token[:, :, None] * width + column[None, None, :], mask=inside[:, :, None], other=0.0).to(tl.float32)
    scale, w = tl.load(statistic + token, mask=inside, other=0.0), tl.load(weight + column).to(tl.float32)
    normed = _normalize(values, scale[:, :, None], w[None, None, :], inside[:, :, None], total.dtype.element_ty)
    _store_columns(
        normed, column_data, column_scale, column_scale, column_scale, token, token_tile, column_tile, padded_tokens, width, POW2, False,
        EPSILON, LARGEST, TILE,
    )  # fmt: skip


def quantize_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale_format: str,
    *,
    columns: bool,
    result: torch.Tensor | None = None,
    **multiples: int,
) -> tuple[torch.Tensor, torch.Tensor, QuantizedPair, QuantizedPair | None]:
    """Return (total `[..., h]`, statistic float32 `[...]`, rows, columns or None) for x `[..., h]`; names as in `kernels.norm.reference`.
    The norm is also written to a contiguous `result` `[..., h]`. `multiples` are arguments of `allocate`. Raise ValueError if h is not a
    multiple of 128 or the shapes do not match."""
    tokens, width = x.shape[:-1].numel(), x.shape[-1]
    if width % BLOCK or weight.shape != (width,) or (residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype)):
        raise ValueError(f"x {list(x.shape)}: the width must be a multiple of {BLOCK}, and residual and weight must match x")
    x, options = align(x.contiguous()), choose_tile(width)
    total = x if residual is None else torch.empty_like(x)
    statistic = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, column_pair = allocate(tokens, width, x.device, rows=True, columns=columns, **multiples)
    assert rows is not None
    unused = torch.empty(0, dtype=torch.uint8, device=x.device)
    formula: Any = {"POW2": scale_format == "pow2", "EPSILON": AMAX_EPSILON, "LARGEST": E4M3_MAX, "TILE": BLOCK}
    if tokens:
        normalize_row[(triton.cdiv(len(rows[0]), options["ROWS"]),)](
            x, unused if residual is None else align(residual.contiguous()), align(weight), unused if residual is None else total,
            statistic, unused if result is None else result, rows[0].view(torch.uint8), rows[1], tokens, len(rows[0]), width,
            rows[1].stride(1), eps, ADDS=residual is not None, STORES=result is not None, **formula, **options,
        )  # fmt: skip
    if tokens and column_pair is not None:
        data, scale = column_pair
        quantize_normed_tile[(triton.cdiv(tokens, BLOCK), width // BLOCK)](
            total, statistic, weight, data.view(torch.uint8), scale, tokens, data.shape[1], width, **formula, **LAUNCH
        )
    return total, statistic, rows, column_pair
