"""Gated delta net of Qwen3-Next and Qwen3.5, defined once for training, prompts, and decoded tokens.

    x = silu(conv(mixed))                               causal and depthwise; taps are added oldest first; rounded to the dtype of mixed
    q, k, v = x                                         q and k divided by sqrt(sum of squares + 1e-6), q also by sqrt(k_dim)
    decay = exp(-exp(a_log) softplus(a + dt_bias))      beta = sigmoid(b)
    S <- decay S        S <- S + k (beta (v - S^T k))^T        o = S^T q                               (`kernels.gated_delta.scan`)

Numbers between x and o are float32, and o is rounded once. The order of operations is by token: packed sequences, prompts in chunks with
any cuts, and decoded tokens give the same bits, with any other sequences in the batch and any share of the heads
(docs/reference/hybrid.md).
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron_rl.kernels.batch_invariant import apply_elementwise, sigmoid
from megatron_rl.kernels.gated_delta import NORM_EPS, DeltaWeights
from megatron_rl.kernels.gated_delta.scan import Inputs, Scan, advance_states
from megatron_rl.kernels.gates.reference import gate_norm
from megatron_rl.precision.threads import single_threaded


def attend(weights: DeltaWeights, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the outputs `[t, v, v_dim]` of packed sequences, which all start at their first token, in the dtype of `mixed`, with gradient.

    Args:
        mixed: Projected queries, keys, and values before the convolution, `[t, c]`.
        a, b: Projected decays and betas, `[t, v]`.
        lengths: Tokens of each sequence; they add up to t.
    """
    lengths = _check(weights, mixed, a, b, lengths)
    if mixed.is_cuda:
        from megatron_rl.kernels.gated_delta import triton

        return triton.attend(weights, mixed, a, b, lengths)
    windows = mixed.new_zeros(len(lengths), mixed.shape[1], weights.conv.shape[1] - 1)
    x = _Convolution.apply(mixed, weights.conv, windows, lengths)
    return Scan.apply(lengths, *_prepare(weights, x, a, b)).to(mixed.dtype)


def attend_gated(
    weights: DeltaWeights, norm: tuple[torch.Tensor, float], qkvz: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Return `gate_norm` of what `attend` returns, with gradient.

    Args:
        norm: Weight `[v_dim]` and epsilon of the gated norm.
        qkvz: `mixed` and the gates of values, `[t, c + v v_dim]`.
        a, b, lengths: As for `attend`.
    """
    mixed, z = qkvz.split([len(weights.conv), qkvz.shape[1] - len(weights.conv)], -1)
    lengths = _check(weights, mixed, a, b, lengths)
    if qkvz.is_cuda:
        from megatron_rl.kernels.gated_delta import triton

        return triton.attend_gated(weights, norm, qkvz, a, b, lengths)
    return gate_norm(attend(weights, mixed, a, b, lengths), z.unflatten(-1, (-1, weights.heads.v_dim)), *norm)


@torch.no_grad()
def advance(
    weights: DeltaWeights, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int], slots: torch.Tensor,
    windows: torch.Tensor, states: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Continue n sequences by chunks of prompts or by decoded tokens. Return the outputs `[t, v, v_dim]`, with no gradient, and update the
    windows and states of the sequences in place.

    Args:
        mixed, a, b, lengths: As for `attend`.
        slots: The place of each sequence in `windows` and `states`, int `[n]`; ~place if it starts, whatever is there.
        windows: The last taps - 1 rows of `mixed` before each chunk, the newest last, `[slots, c, taps - 1]` in the dtype of `mixed`.
        states: float32 `[slots, v, k_dim, v_dim]`.
    """
    lengths = _check(weights, mixed, a, b, lengths)
    _check_states(weights, mixed, windows, states)
    if mixed.is_cuda:
        from megatron_rl.kernels.gated_delta import triton

        return triton.advance(weights, mixed, a, b, lengths, slots, windows, states)
    places, starts = torch.where(slots < 0, ~slots, slots).long(), (slots < 0)[:, None, None]
    taps = _find_taps(lengths, weights.conv.shape[1])
    rows = _append_windows(mixed, windows[places].masked_fill(starts, 0))
    state = states[places].masked_fill(starts[..., None], 0)
    inputs = _prepare(weights, _convolve(rows, weights.conv, taps.tokens)[0].to(mixed.dtype), a, b)
    out = advance_states(inputs, state, lengths).to(mixed.dtype)
    windows[places], states[places] = rows[taps.windows].transpose(1, 2), state
    return out


def _check(weights: DeltaWeights, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return `lengths`. Raise ValueError if the shapes do not belong together."""
    heads, tokens = weights.heads, sum(lengths)
    found = [tuple(x.shape) for x in (mixed, a, b)]
    wanted = [(tokens, sum(heads.widths)), (tokens, heads.v), (tokens, heads.v)]
    if found != wanted or weights.conv.shape[0] != sum(heads.widths) or heads.v % heads.k:
        raise ValueError(f"mixed, a, and b are {found}, conv is {tuple(weights.conv.shape)}; {heads} and {tokens} tokens need {wanted}")
    return tuple(lengths)


def _check_states(weights: DeltaWeights, mixed: torch.Tensor, windows: torch.Tensor, states: torch.Tensor) -> None:
    """Raise ValueError if windows or states would be rounded, or do not have the layer's numbers one after the other."""
    heads = weights.heads
    for name, x, dtype, shape in (
        ("windows", windows, mixed.dtype, (mixed.shape[1], weights.conv.shape[1] - 1)),
        ("states", states, torch.float32, (heads.v, heads.k_dim, heads.v_dim)),
    ):
        if (x.dtype, tuple(x.shape[1:])) != (dtype, shape) or not x.is_contiguous():
            raise ValueError(f"{name} are {x.dtype} {list(x.shape)}, must be {dtype} {['slots', *shape]}, contiguous")


class _Taps(NamedTuple):
    """Places in rows of windows [n (taps - 1), c] followed by tokens [t, c]."""

    tokens: tuple[torch.Tensor, ...]  # for each tap, int64 [t]: the row that it reads for each token
    windows: torch.Tensor  # int64 [n, taps - 1]: the next windows


@functools.lru_cache(16)
def _find_taps(lengths: tuple[int, ...], taps: int) -> _Taps:
    """Return the places of a convolution over packed sequences."""
    size, tokens = torch.tensor(lengths, dtype=torch.int64), sum(lengths)
    starts = torch.tensor(list(accumulate(lengths, initial=0))[:-1], dtype=torch.int64)
    own = torch.arange(len(lengths))
    sequence = own.repeat_interleave(size)

    def find(offset: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
        """Return the rows of places relative to the first token of a chunk."""
        first = sequence * (taps - 1)
        return torch.where(offset >= 0, len(lengths) * (taps - 1) + starts[sequence] + offset, first + taps - 1 + offset)

    offset = torch.arange(tokens) - starts[sequence]
    ends = size[:, None] + torch.arange(1 - taps, 0)
    return _Taps(tuple(find(offset + tap - taps + 1, sequence) for tap in range(taps)), find(ends, own[:, None]))


def _append_windows(mixed: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """Return windows `[n, c, taps - 1]` and tokens `[t, c]` as rows `[n (taps - 1) + t, c]`."""
    return torch.cat([windows.transpose(1, 2).reshape(-1, mixed.shape[1]), mixed])


def _convolve(
    rows: torch.Tensor, weight: torch.Tensor, places: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (silu of total, total, sigmoid of total), float32 `[t, c]`: products and sums are rounded one by one."""
    taps = weight.float().t().contiguous()
    total = rows[places[0]].float() * taps[0]
    for place, tap in zip(places[1:], taps[1:], strict=True):
        total += rows[place].float() * tap
    share = sigmoid(total)
    return total * share, total, share


class _Convolution(torch.autograd.Function):
    """The convolution and SiLU of packed sequences, rounded once; `windows` have no gradient."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, weight: torch.Tensor, windows: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(mixed, weight, windows)
        ctx.places = _find_taps(lengths, weight.shape[1]).tokens
        return _convolve(_append_windows(mixed, windows), weight, ctx.places)[0].to(mixed.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mixed, weight, windows = ctx.saved_tensors
        rows = _append_windows(mixed, windows)
        _, total, share = _convolve(rows, weight, ctx.places)
        of_total = gradient.float() * (share * (1 + total * (1 - share)))
        of_rows, of_taps = rows.new_zeros(rows.shape, dtype=torch.float32), []
        for place, tap in zip(ctx.places, weight.float().unbind(1), strict=True):
            of_rows.index_add_(0, place, of_total * tap)
            of_taps.append((of_total * rows[place].float()).sum(0))
        return of_rows[len(rows) - len(mixed) :].to(mixed.dtype), torch.stack(of_taps, 1).to(weight.dtype), None, None


def _prepare(weights: DeltaWeights, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Inputs:
    """Return the inputs of the recurrence for the convolution's result `[t, c]`."""
    heads = weights.heads
    q, k, v = x.float().split(heads.widths, -1)
    with single_threaded():
        q, k = (_normalize(part.unflatten(-1, (heads.k, heads.k_dim))) for part in (q, k))
        rate = apply_elementwise(torch.exp, weights.a_log.float())
        decay = apply_elementwise(torch.exp, -rate * apply_elementwise(F.softplus, a.float() + weights.dt_bias.float()))
    q, k = (part.repeat_interleave(heads.v // heads.k, 1) for part in (q * heads.k_dim**-0.5, k))
    return Inputs(q, k, v.unflatten(-1, (heads.v, heads.v_dim)), decay, sigmoid(b.float()))


def _normalize(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(sum of squares + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
