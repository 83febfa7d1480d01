"""The Triton kernels of `kernels.vocabulary.reference`."""

import torch
import triton
import triton.language as tl

LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
_LEVELS = 11  # 2,048 lanes of sums; with twice as many, registers spill on Blackwell
_COLUMNS = 4096  # logits of a program that writes their gradient


@triton.jit
def _add_pairs(values, LEVELS: tl.constexpr):
    """Return the sum of 2^LEVELS numbers by a tree of neighbors, in one order for any layout. `tl.sum` follows the layout, which depends on
    the dtype and the alignment of the logits."""
    for _ in tl.static_range(LEVELS):
        a, b = tl.split(tl.reshape(values, (values.shape[0] // 2, 2)))
        values = a + b
    return tl.sum(values, axis=0)


@triton.jit
def summarize_row(logits, columns, result, stride, width, temperature, SCALED: tl.constexpr, LEVELS: tl.constexpr):
    """One program per row and part of logits [n, parts * width], rows `stride` apart: result [parts, n, 4]. Each of COLUMNS lanes has its
    own maximum and sums, which are rescaled when it finds a larger logit: threads meet only at the end."""
    COLUMNS: tl.constexpr = 1 << LEVELS
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride + part * width
    maxima = tl.full([COLUMNS], -1e38, tl.float32)  # finite, so that a difference from -inf is
    total, moment = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32)
        if SCALED:
            x = tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + temperature)
        is_larger, shift = x > maxima, -tl.abs(x - maxima)  # of the sums or of x, whichever is not at the maximum
        shift = tl.maximum(shift, -1e38, propagate_nan=tl.PropagateNan.ALL)  # finite for logits of -inf
        weight = tl.exp(shift)
        factor = tl.where(is_larger, weight, 1.0)
        moment = tl.fma(factor, moment, weight * shift * tl.where(is_larger, total, 1.0))
        total = tl.fma(factor, total, tl.where(is_larger, 1.0, weight))
        maxima = tl.maximum(maxima, x)
    largest = tl.max(maxima, axis=0)
    shift = maxima - largest
    weight = tl.exp(shift)
    moment = weight * (moment + total * shift)
    total = weight * total
    target = tl.load(columns + row) - part * width
    here = (target >= 0) & (target < width)
    at_target = tl.load(logits + tl.where(here, target, 0), mask=here, other=0.0).to(tl.float32)
    if SCALED:
        at_target = tl.div_rn(at_target, at_target * 0.0 + temperature)
    result += (part * tl.num_programs(0) + row) * 4
    tl.store(result, largest)
    tl.store(result + 1, _add_pairs(total, LEVELS))
    tl.store(result + 2, _add_pairs(moment, LEVELS))
    tl.store(result + 3, at_target)


@triton.jit
def differentiate_logits(logits, result, columns, log_sums, scaled, width, temperature, SCALED: tl.constexpr, COLUMNS: tl.constexpr):
    """One program per COLUMNS logits of a row; `result` may be `logits`."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    x = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        x = tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + temperature)
    factor = tl.load(scaled + row)
    gradient = tl.exp(x - tl.load(log_sums + row)) * -factor
    gradient = tl.where(column == tl.load(columns + row), gradient + factor, gradient)
    tl.store(result + row * width + column, gradient.to(result.dtype.element_ty), mask=inside)


def summarize(logits: torch.Tensor, columns: torch.Tensor, temperature: float, parts: int = 1) -> torch.Tensor:
    """Compute `kernels.vocabulary.reference.summarize`. Raise ValueError if shapes do not match."""
    _check(logits, columns)
    result = torch.empty(parts, len(logits), 4, dtype=torch.float32, device=logits.device)
    if len(logits):
        options, width = {"SCALED": temperature != 1.0, "LEVELS": _LEVELS}, logits.shape[1]
        summarize_row[(len(logits), parts)](logits, columns, result, width, width // parts, temperature, **options, **LAUNCH)
    return result


def differentiate_(logits: torch.Tensor, columns: torch.Tensor, log_sums: torch.Tensor, gradient: torch.Tensor, temperature: float) -> None:
    """Compute `kernels.vocabulary.reference.differentiate_`. Raise ValueError if shapes do not match."""
    _check(logits, columns)
    if len(logits):
        grid = len(logits), triton.cdiv(logits.shape[1], _COLUMNS)
        options = {"SCALED": temperature != 1.0, "COLUMNS": _COLUMNS}
        scaled = gradient / temperature
        differentiate_logits[grid](logits, logits, columns, log_sums, scaled, logits.shape[1], temperature, **options, **LAUNCH)


def _check(logits: torch.Tensor, columns: torch.Tensor) -> None:
    """Raise ValueError if the shapes do not match or the logits are not contiguous."""
    if not logits.is_contiguous() or columns.shape != logits.shape[:1]:
        raise ValueError(f"logits {list(logits.shape)} with strides {logits.stride()} and columns {list(columns.shape)} do not match")
