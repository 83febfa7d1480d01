"""The kernels of `kernels.swiglu.reference`.

This file imports Triton, which only GPU builds of torch bring along: import it inside functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_COLUMNS = 1024
"""Results of a program."""


@triton.jit
def _multiply(gate, up):
    """silu(gate) up of float32 values."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def _differentiate(gate, up, dy):
    """The gradients of gate and up."""
    share = tl.div_rn(tl.full(gate.shape, 1.0, tl.float32), 1.0 + tl.exp(-gate))
    return dy * up * (share * (1.0 + gate * (1.0 - share))), dy * (gate * share)


@triton.jit
def multiply_row(x, result, width, COLUMNS: tl.constexpr):
    """One program for COLUMNS results of a token: x [T, 2 width], result [T, width]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (token * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * width + column, _multiply(gate, up).to(result.dtype.element_ty), mask=inside)


@triton.jit
def differentiate_row(x, gradient, result, width, COLUMNS: tl.constexpr):
    """The same for the gradients of x, `result` [T, 2 width]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (token * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(gradient + token * width + column, mask=inside, other=0.0).to(tl.float32)
    of_gate, of_up = _differentiate(gate, up, dy)
    tl.store(result + token * 2 * width + column, of_gate.to(result.dtype.element_ty), mask=inside)
    tl.store(result + (token * 2 + 1) * width + column, of_up.to(result.dtype.element_ty), mask=inside)


def multiply(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) up [..., F] of x [..., 2 F]."""
    x, width = x.contiguous(), x.shape[-1] // 2
    result = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if result.numel():
        multiply_row[(result.numel() // width, triton.cdiv(width, _COLUMNS))](x, result, width, COLUMNS=_COLUMNS, **LAUNCH)
    return result


def differentiate(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x [..., 2 F] for that of the result [..., F]."""
    x, gradient, width = x.contiguous(), gradient.contiguous(), gradient.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if result.numel():
        grid = gradient.numel() // width, triton.cdiv(width, _COLUMNS)
        differentiate_row[grid](x, gradient, result, width, COLUMNS=_COLUMNS, **LAUNCH)
    return result
