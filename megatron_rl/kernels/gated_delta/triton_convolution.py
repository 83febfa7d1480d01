"""Triton kernels of the causal convolution and SiLU in front of the recurrence, their gradients, and the places of packed sequences."""

import functools
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.sums.triton import add_rows
from parallel.attention.gated_delta_net import SPAN

ROW_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_COLUMNS = 512  # channels of a program of the convolution
_TOKENS = 64  # tokens of a program that adds gradients of the convolution's weight


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def convolve_token(
    mixed, windows, slots, weight, result, sequences, starts, stride, channels, TAPS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """One program for COLUMNS channels of a token: mixed and result [t, channels], windows [slots, channels, TAPS - 1]. Tokens of `mixed`
    are `stride` apart."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    sequence = tl.load(sequences + token).to(tl.int64)
    offset, slot = token - tl.load(starts + sequence), tl.load(slots + sequence).to(tl.int64)
    total = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        own = tl.load(mixed + (token - back) * stride + column, mask=inside & (offset >= back), other=0.0).to(tl.float32)
        place = (slot * channels + column) * (TAPS - 1) + tap + offset
        before = tl.load(windows + place, mask=inside & (slot >= 0) & (offset < back), other=0.0).to(tl.float32)
        product = tl.where(offset >= back, own, before) * tl.load(weight + column * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total = product if tap == 0 else total + product
    tl.store(result + token * channels + column, (total * _sigmoid(total)).to(result.dtype.element_ty), mask=inside)


@triton.jit
def move_window(mixed, windows, slots, starts, stride, channels, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program for COLUMNS channels of a sequence, whose window becomes the last TAPS - 1 rows of what was in it and of `mixed`."""
    sequence, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, slot = column < channels, tl.load(slots + sequence).to(tl.int64)
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    place = (tl.where(slot < 0, ~slot, slot) * channels + column) * (TAPS - 1)
    for tap in tl.static_range(TAPS - 1):  # a number is read before its place is written
        row = end - (TAPS - 1) + tap
        own = tl.load(mixed + row * stride + column, mask=inside & (row >= start), other=0.0)
        before = tl.load(windows + place + tap + (end - start), mask=inside & (row < start) & (slot >= 0), other=0.0)
        tl.store(windows + place + tap, tl.where(row >= start, own, before), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def differentiate_tokens(
    mixed, weight, gradient, result, of_weight, sequences, starts, tokens, stride, result_stride, channels, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for COLUMNS channels of TOKENS tokens of sequences that start in this call: the gradient of `mixed`, and its part of that
    of the weight, float32 [programs, TAPS, channels]. It reads each token once, and TAPS - 1 tokens before and behind its own."""
    first, column = tl.program_id(0).to(tl.int64) * TOKENS, tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    taps, sums = tl.tuple(()), tl.tuple(())  # of the weight, and of its gradient
    x, open_sums = tl.tuple(()), tl.tuple(())  # of the last TAPS - 1 tokens, the oldest first: inputs, and unfinished gradients
    for tap in tl.static_range(TAPS):
        taps += (tl.load(weight + column * TAPS + tap, mask=inside, other=0.0).to(tl.float32),)
        sums += (tl.zeros([COLUMNS], tl.float32),)
    for tap in tl.static_range(TAPS - 1):
        before = first + tap - (TAPS - 1)
        x += (tl.load(mixed + before * stride + column, mask=inside & (before >= 0), other=0.0).to(tl.float32),)
        open_sums += (tl.zeros([COLUMNS], tl.float32),)
    for token in range(first, first + TOKENS + TAPS - 1):
        there = token < tokens
        offset = token - tl.load(starts + tl.load(sequences + token, mask=there, other=0))
        x += (tl.load(mixed + token * stride + column, mask=inside & there, other=0.0).to(tl.float32),)
        dy = tl.load(gradient + token * channels + column, mask=inside & there, other=0.0).to(tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        for tap in tl.static_range(TAPS):
            product = tl.where(offset >= TAPS - 1 - tap, x[tap], 0.0) * taps[tap]
            total = product if tap == 0 else total + product
        share = _sigmoid(total)
        of_total = dy * (share * (1.0 + total * (1.0 - share)))
        open_sums += (tl.zeros([COLUMNS], tl.float32),)
        added, closed = tl.tuple(()), tl.tuple(())
        for tap in tl.static_range(TAPS):  # this token read the token TAPS - 1 - tap before it, if that is of its sequence
            reads = offset >= TAPS - 1 - tap
            added += (sums[tap] + tl.where(reads & (token < first + TOKENS), of_total * x[tap], 0.0),)
            closed += (open_sums[tap] + tl.where(reads, of_total * taps[tap], 0.0),)
        place = token - (TAPS - 1)
        tl.store(
            result + place * result_stride + column,
            closed[0].to(result.dtype.element_ty),
            mask=inside & (place >= first) & (place < tokens),
        )
        sums, open_sums, x = added, closed[1:], x[1:]
    for tap in tl.static_range(TAPS):
        place = (tl.program_id(0).to(tl.int64) * TAPS + tap) * channels + column
        tl.store(of_weight + place, sums[tap], mask=inside)


class Packed(NamedTuple):
    """Where packed sequences are in a row, int32 on its device."""

    sequences: torch.Tensor  # [t]: the sequence of each token
    starts: torch.Tensor  # [n + 1]
    span_starts: torch.Tensor  # [n + 1]: numbers of the first span of each sequence
    spans: torch.Tensor  # [spans, 2]: each span's first token, and its sequence's end
    fresh: torch.Tensor  # [n]: slots of sequences that start in this call, which are 0, 1, 2, ...: ~slot, as kernels take a fresh slot


def pack(lengths: tuple[int, ...], device: torch.device) -> Packed:
    """Return the places of sequences of `lengths` tokens. All layers of a pass share them."""
    return _pack_decoded(len(lengths), device) if set(lengths) == {1} else _pack_prompts(lengths, device)


@functools.lru_cache(16)
def _pack_prompts(lengths: tuple[int, ...], device: torch.device) -> Packed:
    starts, spans = (list(accumulate(sizes, initial=0)) for sizes in (lengths, [-(-length // SPAN) for length in lengths]))
    sequences = [number for number, length in enumerate(lengths) for _ in range(length)]
    ends = [(first, end) for start, end in pairwise(starts) for first in range(start, end, SPAN)]
    fresh = list(range(-1, -len(lengths) - 1, -1))
    return Packed(*(torch.tensor(each, dtype=torch.int32).to(device) for each in (sequences, starts, spans, ends, fresh)))


@functools.cache
def _pack_decoded(count: int, device: torch.device) -> Packed:
    """Return the places of `count` sequences of one token, which are kept: a CUDA graph reads them at every replay."""
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    return Packed(starts[:-1], starts, starts, torch.stack([starts[:-1], starts[1:]], 1), ~starts[:-1])


def convolve(mixed: torch.Tensor, weight: torch.Tensor, windows: torch.Tensor, slots: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Return silu of the convolution of packed tokens `[t, channels]` after the windows `[slots, channels, taps - 1]` of their slots."""
    channels, taps = weight.shape
    result = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    grid = len(mixed), triton.cdiv(channels, _COLUMNS)
    convolve_token[grid](
        mixed, windows, slots, weight, result, packed.sequences, packed.starts, mixed.stride(0), channels, TAPS=taps, COLUMNS=_COLUMNS,
        **ROW_LAUNCH,
    )  # fmt: skip
    return result


def differentiate_convolution(
    mixed: torch.Tensor, weight: torch.Tensor, packed: Packed, gradient: torch.Tensor, of_mixed: torch.Tensor
) -> torch.Tensor:
    """Write the gradient of `mixed` to `of_mixed`, and return that of the weight, for the gradient of the convolution's result; sequences
    start with empty windows. Tokens of `mixed` and `of_mixed` may be columns of wider tensors."""
    (tokens, channels), taps = mixed.shape, weight.shape[1]
    programs = triton.cdiv(tokens, _TOKENS)
    of_weight = torch.empty(programs, taps, channels, device=mixed.device)
    differentiate_tokens[(programs, triton.cdiv(channels, _COLUMNS))](
        mixed, weight, gradient, of_mixed, of_weight, packed.sequences, packed.starts, tokens, mixed.stride(0), of_mixed.stride(0),
        channels, TAPS=taps, TOKENS=_TOKENS, COLUMNS=_COLUMNS, **ROW_LAUNCH,
    )  # fmt: skip
    return add_rows(of_weight.flatten(1), weight.dtype).view(taps, channels).t()


def move_windows(mixed: torch.Tensor, windows: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> None:
    """Update the windows of sequences whose tokens `[t, channels]` begin at `starts`."""
    _, channels, size = windows.shape
    grid = len(slots), triton.cdiv(channels, _COLUMNS)
    move_window[grid](mixed, windows, slots, starts, mixed.stride(0), channels, TAPS=size + 1, COLUMNS=_COLUMNS, **ROW_LAUNCH)
