"""The Triton kernels of `kernels.vocabulary.reference`."""

import torch
import triton
import triton.language as tl

LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
_COLUMNS = 4096  # logits that a program loads at a time


@triton.jit
def summarize_row(logits, columns, result, width, temperature, SCALED: tl.constexpr, COLUMNS: tl.constexpr):
    """One program per row of logits [n, width]: result [n, 4]. The sums are rescaled whenever a larger logit is found."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    largest = tl.full([], -1e38, tl.float32)  # finite, so that largest - largest is 0
    total, moment = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32)
        if SCALED:
            x = tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + temperature)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        factor, shift = tl.exp(largest - larger), largest - larger
        moment = factor * (moment + total * shift)
        total = factor * total
        shifted = x - larger
        weight = tl.exp(shifted)
        total += weight
        moment += tl.where(column < width, shifted * weight, 0.0)
        largest = larger
    target = tl.load(columns + row)
    here = (target >= 0) & (target < width)
    at_target = tl.load(logits + tl.where(here, target, 0), mask=here, other=0.0).to(tl.float32)
    if SCALED:
        at_target = tl.div_rn(at_target, at_target * 0.0 + temperature)
    tl.store(result + row * 4, largest)
    tl.store(result + row * 4 + 1, tl.sum(total, axis=0))
    tl.store(result + row * 4 + 2, tl.sum(moment, axis=0))
    tl.store(result + row * 4 + 3, at_target)


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


def summarize(logits: torch.Tensor, columns: torch.Tensor, temperature: float) -> torch.Tensor:
    """Compute `kernels.vocabulary.reference.summarize`. Raise ValueError if shapes do not match."""
    _check(logits, columns)
    result = torch.empty(len(logits), 4, dtype=torch.float32, device=logits.device)
    if len(logits):
        options = {"SCALED": temperature != 1.0, "COLUMNS": _COLUMNS}
        summarize_row[(len(logits),)](logits, columns, result, logits.shape[1], temperature, **options, **LAUNCH)
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
