"""The backward kernel of `kernels.norm.reference`.

This file imports Triton, which only GPU builds of torch bring along: import it inside functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 16
"""Of a program, whose part of the weight's gradient is added up in registers."""


@triton.jit
def differentiate_norm_rows(
    gradient,
    total,
    statistic,
    weight,
    of_total,
    result,
    of_weight,
    tokens,
    width,
    ADDS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
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


def choose_launch(width: int) -> dict[str, int | bool]:
    """Return how a program of whole rows is launched. Without fused multiply-add the arithmetic is that of single operators."""
    warps = 4 if width <= 2048 else 8 if width <= 4096 else 16
    return {"WIDTH_TILE": triton.next_power_of_2(width), "num_warps": warps, "enable_fp_fusion": False}


def differentiate(
    gradient: torch.Tensor, total: torch.Tensor, statistic: torch.Tensor, weight: torch.Tensor, of_total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `kernels.norm.reference.differentiate_norm` does. Raise ValueError where shapes do not fit."""
    tokens, width = statistic.numel(), total.shape[-1]
    if gradient.shape != total.shape or statistic.shape != total.shape[:-1] or (of_total is not None and of_total.shape != total.shape):
        raise ValueError(f"total {list(total.shape)}, its gradient and that of its norm {list(gradient.shape)} do not fit")
    programs = triton.cdiv(tokens, _TOKENS)
    result = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    of_weight = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    if tokens:
        differentiate_norm_rows[(programs,)](
            gradient.contiguous(),
            total,
            statistic,
            weight,
            torch.empty(0, device=total.device) if of_total is None else of_total.contiguous(),
            result,
            of_weight,
            tokens,
            width,
            ADDS=of_total is not None,
            TOKENS=_TOKENS,
            **choose_launch(width),
        )
    return result, of_weight.sum(0).to(weight.dtype)
