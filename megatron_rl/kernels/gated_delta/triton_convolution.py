"""Triton kernels of the causal convolution and SiLU in front of the recurrence, their gradients, and the places of packed sequences."""

import functools
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel.attention.gated_delta_net import SPAN

ROW_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_COLUMNS = 512  # channels of a program of the convolution
_TOKENS = 64  # tokens of a program that adds gradients of the convolution's weight


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def convolve_token(mixed, windows, weight, result, sequences, starts, channels, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program for COLUMNS channels of a token: mixed and result [t, channels], windows [n, channels, TAPS - 1]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    sequence = tl.load(sequences + token).to(tl.int64)
    offset = token - tl.load(starts + sequence)
    total = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        own = tl.load(mixed + (token - back) * channels + column, mask=inside & (offset >= back), other=0.0).to(tl.float32)
        place = (sequence * channels + column) * (TAPS - 1) + tap + offset
        before = tl.load(windows + place, mask=inside & (offset < back), other=0.0).to(tl.float32)
        product = tl.where(offset >= back, own, before) * tl.load(weight + column * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total = product if tap == 0 else total + product
    tl.store(result + token * channels + column, (total * _sigmoid(total)).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def differentiate_totals(
    mixed, weight, gradient, of_total, of_weight, sequences, starts, tokens, channels, TAPS: tl.constexpr, TAPS_TILE: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for COLUMNS channels of TOKENS tokens of sequences that start in this call: gradients of the sums before SiLU, `of_total`
    float32 [t, channels], and parts of that of the weight, float32 [programs, channels, TAPS]."""
    first, column = tl.program_id(0).to(tl.int64) * TOKENS, tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tap = tl.arange(0, TAPS_TILE)
    inside = (column < channels)[:, None] & (tap < TAPS)[None, :]
    w = tl.load(weight + column[:, None] * TAPS + tap[None, :], mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([COLUMNS, TAPS_TILE], tl.float32)
    for token in range(first, min(first + TOKENS, tokens)):
        offset = token - tl.load(starts + tl.load(sequences + token))
        back = TAPS - 1 - tap
        x = tl.load(mixed + (token - back)[None, :] * channels + column[:, None], mask=inside & (offset >= back)[None, :], other=0.0)
        x = x.to(tl.float32)
        total = tl.sum(x * w, axis=1)
        share = _sigmoid(total)
        dy = tl.load(gradient + token * channels + column, mask=column < channels, other=0.0).to(tl.float32)
        dtotal = dy * (share * (1.0 + total * (1.0 - share)))
        tl.store(of_total + token * channels + column, dtotal, mask=column < channels)
        sums += dtotal[:, None] * x
    place = (tl.program_id(0).to(tl.int64) * channels + column[:, None]) * TAPS + tap[None, :]
    tl.store(of_weight + place, sums, mask=inside)


@triton.jit
def spread_totals(of_total, weight, result, sequences, starts, channels, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program for COLUMNS channels of a token: the gradient of `mixed` for that of the sums before SiLU."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    left = tl.load(starts + tl.load(sequences + token) + 1) - token
    total = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        ahead = TAPS - 1 - tap
        x = tl.load(of_total + (token + ahead) * channels + column, mask=inside & (ahead < left), other=0.0)
        total += x * tl.load(weight + column * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * channels + column, total.to(result.dtype.element_ty), mask=inside)


class Packed(NamedTuple):
    """Where packed sequences are in a row, int32 on its device."""

    sequences: torch.Tensor  # [t]: the sequence of each token
    starts: torch.Tensor  # [n + 1]
    span_starts: torch.Tensor  # [n + 1]: numbers of the first span of each sequence


def pack(lengths: tuple[int, ...], device: torch.device) -> Packed:
    """Return the places of sequences of `lengths` tokens. All layers of a pass share them."""
    return _pack_decoded(len(lengths), device) if set(lengths) == {1} else _pack_prompts(lengths, device)


@functools.lru_cache(16)
def _pack_prompts(lengths: tuple[int, ...], device: torch.device) -> Packed:
    starts, spans = (list(accumulate(sizes, initial=0)) for sizes in (lengths, [-(-length // SPAN) for length in lengths]))
    sequences = [number for number, length in enumerate(lengths) for _ in range(length)]
    return Packed(*(torch.tensor(each, dtype=torch.int32).to(device) for each in (sequences, starts, spans)))


@functools.cache
def _pack_decoded(count: int, device: torch.device) -> Packed:
    """Return the places of `count` sequences of one token, which are kept: a CUDA graph reads them at every replay."""
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    return Packed(starts[:-1], starts, starts)


def convolve(mixed: torch.Tensor, weight: torch.Tensor, windows: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Return silu of the convolution of packed tokens `[t, channels]` after their windows `[n, channels, taps - 1]`."""
    channels, taps = weight.shape
    result = torch.empty_like(mixed)
    grid = len(mixed), triton.cdiv(channels, _COLUMNS)
    convolve_token[grid](
        mixed, windows, weight, result, packed.sequences, packed.starts, channels, TAPS=taps, COLUMNS=_COLUMNS, **ROW_LAUNCH
    )  # fmt: skip
    return result


def differentiate_convolution(
    mixed: torch.Tensor, weight: torch.Tensor, packed: Packed, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `mixed` and the weight for that of the convolution's result; sequences start with empty windows."""
    (tokens, channels), taps = mixed.shape, weight.shape[1]
    of_total, of_mixed = torch.empty(mixed.shape, device=mixed.device), torch.empty_like(mixed)
    programs, columns = triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, _COLUMNS)
    of_weight = torch.empty(programs, channels, taps, device=mixed.device)
    places = packed.sequences, packed.starts
    differentiate_totals[(programs, columns)](
        mixed, weight, gradient, of_total, of_weight, *places, tokens, channels, TAPS=taps, TAPS_TILE=triton.next_power_of_2(taps),
        TOKENS=_TOKENS, COLUMNS=_COLUMNS, **ROW_LAUNCH,
    )  # fmt: skip
    spread_totals[(tokens, columns)](of_total, weight, of_mixed, *places, channels, TAPS=taps, COLUMNS=_COLUMNS, **ROW_LAUNCH)
    return of_mixed, of_weight.sum(0).to(weight.dtype)


def move_windows(mixed: torch.Tensor, windows: torch.Tensor, starts: torch.Tensor, size: int) -> torch.Tensor:
    """Return the last `size` rows of each sequence as windows `[n, c, size]`."""
    places = starts[1:, None] + torch.arange(-size, 0, device=mixed.device)
    ahead = starts[1:] - starts[:-1]
    old = (torch.arange(size, device=mixed.device) + ahead[:, None]).clamp(max=size - 1)
    shifted = windows.gather(2, old[:, None].expand(windows.shape))
    own = mixed[places.clamp(min=0, max=len(mixed) - 1)].transpose(1, 2)
    return torch.where((places >= starts[:-1, None])[:, None], own, shifted)
