"""The kernels of `kernels.experts.reference`, one program for each row that is read or written whole.

This file imports Triton, which only GPU builds of torch bring along: import it inside functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.norm.triton import choose_launch


@triton.jit
def scatter_row(x, order, result, width, K: tl.constexpr, WIDTH_TILE: tl.constexpr):
    """A token of x [n, width], to its K places in the result."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE)
    row = tl.load(x + token * width + column, mask=column < width)
    for number in tl.static_range(K):
        place = tl.load(order + token * K + number)
        tl.store(result + place * width + column, row, mask=column < width)


@triton.jit
def sum_row(x, order, result, width, K: tl.constexpr, WIDTH_TILE: tl.constexpr):
    """A token of the result [n, width], of its K rows of x."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE)
    total = tl.zeros([WIDTH_TILE], tl.float32)
    for number in tl.static_range(K):
        place = tl.load(order + token * K + number)
        total += tl.load(x + place * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(result + token * width + column, total.to(result.dtype.element_ty), mask=column < width)


@triton.jit
def collect_row(x, places, weights, result, width, WEIGHS: tl.constexpr, WIDTH_TILE: tl.constexpr):
    """A row of the result [n, width]."""
    number, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE)
    row = tl.load(x + tl.load(places + number) * width + column, mask=column < width, other=0.0)
    if WEIGHS:
        row = (row.to(tl.float32) * tl.load(weights + number)).to(result.dtype.element_ty)
    tl.store(result + number * width + column, row, mask=column < width)


def scatter(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return [n k, h]: x [n, h] at the places `order` [n, k]. Raise ValueError where these are of another n."""
    x, (tokens, k) = _check(x, order, 1), order.shape
    result = torch.empty(tokens * k, x.shape[1], dtype=x.dtype, device=x.device)
    if result.numel():
        scatter_row[(tokens,)](x, order.contiguous(), result, x.shape[1], K=k, **choose_launch(x.shape[1]))
    return result


def sum_rows(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return [n, h]: the sums of the rows `order` [n, k] of x [n k, h]. Raise ValueError where x has others."""
    x, (tokens, k) = _check(x, order, order.shape[1]), order.shape
    result = torch.empty(tokens, x.shape[1], dtype=x.dtype, device=x.device)
    if result.numel():
        sum_row[(tokens,)](x, order.contiguous(), result, x.shape[1], K=k, **choose_launch(x.shape[1]))
    return result


def collect_rows(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the rows `places` [n] of x [T, h], times weights [n]."""
    x, result = x.contiguous(), torch.empty(len(places), x.shape[1], dtype=x.dtype, device=x.device)
    if result.numel():
        given = torch.empty(0, device=x.device) if weights is None else weights.contiguous()
        collect_row[(len(places),)](x, places, given, result, x.shape[1], WEIGHS=weights is not None, **choose_launch(x.shape[1]))
    return result


def _check(x: torch.Tensor, order: torch.Tensor, rows_of_token: int) -> torch.Tensor:
    if x.dim() != 2 or len(x) != len(order) * rows_of_token:
        raise ValueError(f"x {list(x.shape)} does not fit tokens' places {list(order.shape)}")
    return x.contiguous()
