"""The Triton kernels of `kernels.gates.reference`, and their gradients.

A program computes whole rows, one after the other, so the bits of a row do not depend on the number of rows,
which is no compile-time constant. Gradients of the norm's weight
are added over the rows of a program, then over programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_ROWS = 16  # rows of a program


def align(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy, contiguous and at an address that is a multiple of 16, so that kernels have one specialization."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def align_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x `[t, ...]`, or a copy, whose tokens are contiguous and start at multiples of 16 bytes, such as columns of a projection."""
    fits = len(x) > 0 and x[0].is_contiguous() and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return x if fits else align(x)


@triton.jit
def _load(x, place, inside):
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["rows"])
def gate_norm_rows(x, z, weight, result, rows, heads, z_stride, eps, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """One program for ROWS rows of [rows, WIDTH]; `heads` rows in a row are a token, whose gates begin `z_stride` after another's."""
    first, column = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, TILE)
    inside = column < WIDTH
    w = _load(weight, column, inside)
    for row in range(first, min(first + ROWS, rows)):
        values, gates = _load(x, row * WIDTH + column, inside), _load(z, row // heads * z_stride + row % heads * WIDTH + column, inside)
        statistic = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(values * values, axis=0), float(WIDTH)) + eps))
        total = values * statistic * w * (gates * _sigmoid(gates))
        tl.store(result + row * WIDTH + column, total.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def differentiate_gate_norm(
    x, z, weight, gradient, of_x, of_z, of_weight, rows, heads, z_stride, of_z_stride, eps, WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows; `of_weight` float32 [programs, WIDTH]."""
    first, column = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, TILE)
    inside = column < WIDTH
    w, sums = _load(weight, column, inside), tl.zeros([TILE], tl.float32)
    for row in range(first, min(first + ROWS, rows)):
        place, token, number = row * WIDTH + column, row // heads, row % heads * WIDTH + column
        values, gates, dy = _load(x, place, inside), _load(z, token * z_stride + number, inside), _load(gradient, place, inside)
        statistic = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(values * values, axis=0), float(WIDTH)) + eps))
        share, normed = _sigmoid(gates), values * statistic
        of_normed = dy * (gates * share)
        sums += of_normed * normed
        weighed = of_normed * w
        mean = tl.div_rn(tl.sum(weighed * normed, axis=0), float(WIDTH))
        tl.store(of_x + place, (statistic * (weighed - normed * mean)).to(of_x.dtype.element_ty), mask=inside)
        slope = share * (1.0 + gates * (1.0 - share))
        tl.store(of_z + token * of_z_stride + number, (dy * (normed * w) * slope).to(of_z.dtype.element_ty), mask=inside)
    tl.store(of_weight + tl.program_id(0).to(tl.int64) * WIDTH + column, sums, mask=inside)


@triton.jit
def gate_row(x, z, result, width, GATES: tl.constexpr, TILE: tl.constexpr):
    """One program for a row of [rows, width]. GATES: each number has its own gate; otherwise the row has one, z [rows, 1]."""
    row = tl.program_id(0).to(tl.int64)
    for first in range(0, width, TILE):
        column = first + tl.arange(0, TILE)
        inside = column < width
        gates = _load(z, row * width + column, inside) if GATES else _load(z, row + 0 * column, inside)
        values = _load(x, row * width + column, inside) * _sigmoid(gates)
        tl.store(result + row * width + column, values.to(result.dtype.element_ty), mask=inside)


@triton.jit
def differentiate_gate(x, z, gradient, of_x, of_z, width, GATES: tl.constexpr, TILE: tl.constexpr):
    """One program for a row: the gradients of x and of its gates."""
    row, total = tl.program_id(0).to(tl.int64), tl.zeros([TILE], tl.float32)
    for first in range(0, width, TILE):
        column = first + tl.arange(0, TILE)
        place, inside = row * width + column, column < width
        share = _sigmoid(_load(z, place, inside) if GATES else _load(z, row + 0 * column, inside))
        values, dy = _load(x, place, inside), _load(gradient, place, inside)
        tl.store(of_x + place, (dy * share).to(of_x.dtype.element_ty), mask=inside)
        slope = dy * values * (share * (1.0 - share))
        if GATES:
            tl.store(of_z + place, slope.to(of_z.dtype.element_ty), mask=inside)
        else:
            total += slope
    if not GATES:
        tl.store(of_z + row, tl.sum(total, axis=0).to(of_z.dtype.element_ty))


class _GateNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, z, weight = align(x), align_rows(z), align(weight)
        ctx.save_for_backward(x, z, weight)
        ctx.eps = eps
        return run_gate_norm(x, z, weight, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        of_z = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        of_x, of_weight = differentiate_gates(x, z, weight, ctx.eps, gradient, of_z)
        return of_x, of_z, of_weight, None


def run_gate_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `kernels.gates.reference.gate_norm` without gradient. `z` is as `align_rows` returns it, the others as `align` does."""
    result, rows, width = torch.empty_like(x), x.numel() // len(weight), len(weight)
    if rows:
        gate_norm_rows[(triton.cdiv(rows, _ROWS),)](
            x, z, weight, result, rows, *_find_tokens(z), eps, width, triton.next_power_of_2(width), _ROWS, **LAUNCH
        )  # fmt: skip
    return result


def differentiate_gates(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, gradient: torch.Tensor, of_z: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the gradient of z to `of_z`, whose tokens may be columns of a wider tensor. Return the gradients of x and the weight."""
    of_x, rows, width = torch.empty_like(x), x.numel() // len(weight), len(weight)
    programs = triton.cdiv(rows, _ROWS)
    of_weight = torch.empty(programs, width, device=x.device)
    if rows:
        differentiate_gate_norm[(programs,)](
            x, z, weight, align(gradient), of_x, of_z, of_weight, rows, *_find_tokens(z), of_z.stride(0), eps, width,
            triton.next_power_of_2(width), _ROWS, **LAUNCH,
        )  # fmt: skip
    return of_x, of_weight.sum(0).to(weight.dtype)


def _find_tokens(z: torch.Tensor) -> tuple[int, int]:
    """Return (rows of a token, numbers from one token to the next) of z `[t, ..., width]`."""
    return z[0].numel() // z.shape[-1], z.stride(0)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x, z = align(x), align(z)
        ctx.save_for_backward(x, z)
        result = torch.empty_like(x)
        if x.numel():
            gate_row[(x.numel() // x.shape[-1],)](x, z, result, x.shape[-1], z.shape == x.shape, _choose_tile(x), **LAUNCH)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, z = ctx.saved_tensors
        of_x, of_z = torch.empty_like(x), torch.empty_like(z)
        if x.numel():
            grid = (x.numel() // x.shape[-1],)
            differentiate_gate[grid](x, z, align(gradient), of_x, of_z, x.shape[-1], z.shape == x.shape, _choose_tile(x), **LAUNCH)
        return of_x, of_z


def _choose_tile(x: torch.Tensor) -> int:
    return min(1024, triton.next_power_of_2(x.shape[-1]))


def gate_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `kernels.gates.reference.gate_norm`."""
    return _GateNorm.apply(x, z, weight, eps)


def gate(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Compute `kernels.gates.reference.gate`. Raise ValueError if z is neither as wide as x nor one number per row."""
    if z.shape not in (x.shape, (*x.shape[:-1], 1)):
        raise ValueError(f"x {list(x.shape)} and its gates {list(z.shape)} do not match")
    return _Gate.apply(x, z)
