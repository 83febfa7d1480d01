"""The Triton kernels of `kernels.swiglu.reference`: SwiGLU and its gradient, written in the dtype of x or quantized without a BF16 copy.

Values are rounded to the dtype of gate and up before they are quantized, so bytes and scales equal those of SwiGLU followed by
`kernels.quantize.triton`, in the same layouts.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels import blackwell
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.kernels.quantize.triton import (
    LAUNCH,
    ROW_COLUMNS,
    ROW_TOKENS,
    QuantizedPair,
    _number_tokens,
    _store_columns,
    _store_groups,
    _store_rows,
    allocate,
    shape_groups,
)
from megatron_rl.precision.contract import AMAX_EPSILON, E4M3_MAX
from parallel.formats import BLOCK


@triton.jit
def _multiply(gate, up):
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def _differentiate(gate, up, dy):
    """Return the gradients of gate and up."""
    share = tl.div_rn(tl.full(gate.shape, 1.0, tl.float32), 1.0 + tl.exp(-gate))
    return dy * up * (share * (1.0 + gate * (1.0 - share))), dy * (gate * share)


@triton.jit(do_not_specialize=["row_scale_stride"])
def multiply_row(
    x, result, row_data, row_scale, width, row_scale_stride, QUANTIZES: tl.constexpr, POW2: tl.constexpr, EPSILON: tl.constexpr,
    LARGEST: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for COLUMNS results of a token: x [T, 2 width], result [T, width]. With QUANTIZES, it also writes their Q_1x128."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (token * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    product = _multiply(gate, up).to(result.dtype.element_ty)
    tl.store(result + token * width + column, product, mask=inside)
    if QUANTIZES:
        values = product.to(tl.float32)
        _store_groups(values, row_data, row_scale, token, first, width, row_scale_stride, 1, POW2, EPSILON, LARGEST, TILE, COLUMNS)


@triton.jit
def differentiate_row(x, gradient, result, width, COLUMNS: tl.constexpr):
    """One program for COLUMNS gradients of gate and of up of a token; `result` [T, 2 width]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (token * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(gradient + token * width + column, mask=inside, other=0.0).to(tl.float32)
    of_gate, of_up = _differentiate(gate, up, dy)
    tl.store(result + token * 2 * width + column, of_gate.to(result.dtype.element_ty), mask=inside)
    tl.store(result + (token * 2 + 1) * width + column, of_up.to(result.dtype.element_ty), mask=inside)


def multiply(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) up `[..., F]` of x `[..., 2 F]`."""
    return _multiply_rows(x, None, "")


def multiply_and_quantize(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, QuantizedPair]:
    """Return (`multiply` `[T, F]`, its rows in the layout of `kernels.quantize.triton`) of x `[T, 2 F]`, F a multiple of 128."""
    rows, _ = allocate(len(x), x.shape[1] // 2, x.device, rows=True, columns=False)
    assert rows is not None
    return _multiply_rows(x, rows, scale_format), rows


def _multiply_rows(x: torch.Tensor, rows: QuantizedPair | None, scale_format: str) -> torch.Tensor:
    x, width = x.contiguous(), x.shape[-1] // 2
    result = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    data, scale = (rows[0].view(torch.uint8), rows[1]) if rows else (x.new_empty(0), x.new_empty(0))
    if result.numel():
        multiply_row[(result.numel() // width, triton.cdiv(width, ROW_COLUMNS))](
            x, result, data, scale, width, scale.stride(-1), QUANTIZES=rows is not None, POW2=scale_format == "pow2", EPSILON=AMAX_EPSILON,
            LARGEST=E4M3_MAX, TILE=BLOCK, COLUMNS=ROW_COLUMNS, **LAUNCH,
        )  # fmt: skip
    return result


def differentiate(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x `[..., 2 F]` for the gradient `[..., F]` of the result."""
    x, gradient, width = x.contiguous(), gradient.contiguous(), gradient.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if result.numel():
        grid = gradient.numel() // width, triton.cdiv(width, ROW_COLUMNS)
        differentiate_row[grid](x, gradient, result, width, COLUMNS=ROW_COLUMNS, **LAUNCH)
    return result


@triton.jit
def _compute_rows(gate_up, gradient, first, column, token, tokens, width, TILE: tl.constexpr, BACKWARD: tl.constexpr):
    """Return SwiGLU's result [n, TILE] for tokens `token` [n] after `first`, from column `column` on, rounded, or the gradients of gate and
    of up."""
    inside = (token < tokens - first)[:, None]
    column = column + tl.arange(0, TILE)[None, :]
    source = gate_up + first * 2 * width + (token[:, None] * 2 * width + column)
    gate, up = tl.load(source, mask=inside, other=0.0).to(tl.float32), tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        dy = tl.load(gradient + first * width + (token[:, None] * width + column), mask=inside, other=0.0).to(tl.float32)
        result, second = _differentiate(gate, up, dy)
    else:
        result = _multiply(gate, up)
        second = result
    return result.to(gate_up.dtype.element_ty), second.to(gate_up.dtype.element_ty)


@triton.jit
def _interleave(a, b, c, d):
    """Four times [n, TILE] -> [4, n, TILE], in the layout of `_number_tokens`."""
    return tl.reshape(tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (2, 3, 0, 1)), (4, a.shape[0], a.shape[1]))


@triton.jit
def quantize_swiglu_tile(
    gate_up, gradient, row_data, row_scale, column_data, column_scale, group_start, group_length, owners, tokens, row_tokens, column_tokens,
    width, row_scale_stride, POW2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACKWARD: tl.constexpr, GROUPED: tl.constexpr,
    BY_TOKEN: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """One program per TOKENSx128 tile of SwiGLU's result [tokens, width]. BACKWARD: per tile of its gradient, which gives two tiles of the
    gradient of gate_up [tokens, 2 width]. Rows of no expert are left out.
    AGAIN: the second tile is computed by itself, for which fewer registers suffice."""
    token_tile, column_tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, column = token_tile * TOKENS, column_tile * TILE
    token, row = _number_tokens(first, TOKENS), 4 * tl.arange(0, TOKENS // 4)
    halves: tl.constexpr = 2 if BACKWARD else 1
    if GROUPED and not COLUMNS:  # with columns, the host knows the counts, and every row has an expert
        owned = (tl.load(owners + first) >= 0).to(tl.int32)
        tokens, row_tokens = tokens * owned, row_tokens * owned
    for half in tl.static_range(halves):
        if AGAIN or half == 0:  # in four steps, since the float32 values of all would not fit in registers
            a, e = _compute_rows(gate_up, gradient, first, column, row, tokens, width, TILE, BACKWARD)
            b, f = _compute_rows(gate_up, gradient, first, column, row + 1, tokens, width, TILE, BACKWARD)
            c, g = _compute_rows(gate_up, gradient, first, column, row + 2, tokens, width, TILE, BACKWARD)
            d, h = _compute_rows(gate_up, gradient, first, column, row + 3, tokens, width, TILE, BACKWARD)
            result, second = _interleave(a, b, c, d), _interleave(e, f, g, h)
        values, tile = (second if half else result).to(tl.float32), column_tile + half * (width // TILE)
        if ROWS:
            _store_rows(
                values, row_data, row_scale, token, tile, row_tokens, halves * width, row_scale_stride, 1, POW2, EPSILON, LARGEST, TILE
            )  # fmt: skip
        if COLUMNS:
            _store_columns(
                values, column_data, column_scale, group_start, group_length, token, token_tile, tile, column_tokens, halves * width, POW2,
                GROUPED, EPSILON, LARGEST, TILE, BY_TOKEN,
            )  # fmt: skip


def quantize_swiglu(
    gate_up: torch.Tensor,
    gradient: torch.Tensor | None,
    scale_format: str,
    *,
    rows: bool,
    columns: bool,
    groups: TokenGroups | None = None,
    by_token: bool = False,
    **multiples: int,
) -> tuple[QuantizedPair | None, QuantizedPair | None]:
    """Return (rows, columns), quantized, of SwiGLU's result `[T, F]` for gate_up `[T, 2 F]`. Given the gradient `[T, F]` of the result,
    return those of the gradient of gate_up `[T, 2 F]`.

    `groups` and `by_token` are those of `quantize_activation`, `multiples` are arguments of `allocate`. Raise ValueError if F is not
    a multiple of 128 or the shapes do not match.
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    fits = gate_up.shape[1] % (2 * BLOCK) == 0 and (
        gradient is None or (gradient.shape, gradient.dtype) == ((tokens, width), gate_up.dtype)
    )
    if not fits or (groups is not None and groups.rows != tokens):
        raise ValueError(f"gate_up {list(gate_up.shape)}: both halves must be multiples of {BLOCK}, and gradient and groups must match")
    gate_up = gate_up.contiguous()
    of_result = width if gradient is None else 2 * width
    row_pair, column_pair = allocate(tokens, of_result, gate_up.device, rows=rows, columns=columns, **multiples)
    unused: Any = torch.empty(0, dtype=torch.uint8, device=gate_up.device)
    row_data, row_scale = (row_pair[0].view(torch.uint8), row_pair[1]) if row_pair else (unused, unused)
    column_data, column_scale = (column_pair[0].view(torch.uint8), column_pair[1]) if column_pair else (unused, unused)
    tables = (unused, unused, unused) if groups is None else (*groups.tiles, groups.experts)
    splits = blackwell.is_blackwell()
    program, warps = (BLOCK, 8) if columns else (ROW_TOKENS, 8 if splits else 4)
    if tokens:
        quantize_swiglu_tile[(triton.cdiv(tokens, program), width // BLOCK)](
            gate_up, unused if gradient is None else gradient.contiguous(), row_data, row_scale, column_data, column_scale,
            *tables, tokens, len(row_pair[0]) if row_pair else 0, column_pair[0].shape[1] if column_pair else 0, width,
            row_scale.stride(-1), POW2=scale_format == "pow2", ROWS=rows, COLUMNS=columns, BACKWARD=gradient is not None,
            GROUPED=groups is not None, BY_TOKEN=by_token, EPSILON=AMAX_EPSILON, LARGEST=E4M3_MAX, TILE=BLOCK,
            TOKENS=program, AGAIN=columns and splits, **(LAUNCH | {"num_warps": warps}),
        )  # fmt: skip
    return row_pair, shape_groups(column_pair, groups, by_token)
