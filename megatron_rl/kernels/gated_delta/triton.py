"""The Triton kernel of the recurrence of `kernels.gated_delta.reference`, and its operators: the convolution is in `triton_convolution`,
what the recurrence reads in `triton_inputs`, and its gradient in `triton_spans`.

`advance_state` is one kernel for training, prompts, and decoded tokens, compiled once: it always reads and writes a state for each
sequence, no argument that differs between these uses is a compile-time constant, and pointers are aligned. Another specialization could add
in another order. A program keeps some columns of a head's state in registers from a sequence's first token to its last. All rows of these
columns are in one program, so a share of the heads has the bits of all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.gated_delta import DeltaHeads, DeltaWeights
from megatron_rl.kernels.gated_delta.triton_convolution import Packed, convolve, differentiate_convolution, move_windows, pack
from megatron_rl.kernels.gated_delta.triton_inputs import name_sizes, prepare
from megatron_rl.kernels.gated_delta.triton_spans import differentiate
from megatron_rl.kernels.gates.triton import align, align_rows, differentiate_gates, run_gate_norm
from parallel.attention.gated_delta_net import SPAN

STATE_LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}
_STATE_COLUMNS = 16  # columns of v_dim of a program


@triton.jit
def _load_token(
    q, k, x, decay, beta, token, head, column, there, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, K_TILE: tl.constexpr,
):  # fmt: skip
    """Return float32 q, k, some columns of v, decay, and beta of a token, if it is `there`."""
    row, keys = tl.arange(0, K_TILE), (token * K_HEADS + head // (V_HEADS // K_HEADS)) * K_DIM
    v_place = token * (2 * K_HEADS * K_DIM + V_HEADS * V_DIM) + 2 * K_HEADS * K_DIM + head * V_DIM + column
    query = tl.load(q + keys + row, mask=there & (row < K_DIM), other=0.0)
    key = tl.load(k + keys + row, mask=there & (row < K_DIM), other=0.0)
    value = tl.load(x + v_place, mask=there & (column < V_DIM), other=0.0).to(tl.float32)
    place = token * V_HEADS + head
    return query, key, value, tl.load(decay + place, mask=there, other=0.0), tl.load(beta + place, mask=there, other=0.0)


@triton.jit(do_not_specialize=["keeps"])
def advance_state(
    q, k, x, decays, betas, states, slots, out, errors, kept, starts, span_starts, keeps, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program for V_TILE columns of a head of a sequence. `states` [slots, V_HEADS, K_DIM, V_DIM] are updated; a sequence of slot ~s
    starts with zeros, and ends in s. If `keeps`, e is written to `errors` [t, V_HEADS, V_DIM] and the state before each span to `kept`
    [spans, V_HEADS, K_DIM, V_DIM]. A token's inputs are loaded while the token before it is computed."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, K_TILE), tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    place, inside = row[:, None] * V_DIM + column[None, :], (row < K_DIM)[:, None] & (column < V_DIM)[None, :]
    slot = tl.load(slots + sequence).to(tl.int64)
    own = states + (tl.where(slot < 0, ~slot, slot) * V_HEADS + head) * K_DIM * V_DIM + place
    state = tl.load(own, mask=inside & (slot >= 0), other=0.0)
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    span = tl.load(span_starts + sequence).to(tl.int64)
    following = _load_token(q, k, x, decays, betas, start, head, column, start < end, K_HEADS, V_HEADS, K_DIM, V_DIM, K_TILE)
    for token in range(start, end):
        query, key, value, decay, beta = following
        following = _load_token(q, k, x, decays, betas, token + 1, head, column, token + 1 < end, K_HEADS, V_HEADS, K_DIM, V_DIM, K_TILE)
        step = token - start
        if (keeps != 0) & (step % SPAN == 0):
            tl.store(kept + ((span + step // SPAN) * V_HEADS + head) * K_DIM * V_DIM + place, state, mask=inside)
        state = state * decay
        error = value - tl.sum(state * key[:, None], axis=0)
        state = state + key[:, None] * (error * beta)[None, :]
        result = (token * V_HEADS + head) * V_DIM + column
        tl.store(out + result, tl.sum(state * query[:, None], axis=0).to(out.dtype.element_ty), mask=column < V_DIM)
        if keeps != 0:
            tl.store(errors + result, error, mask=column < V_DIM)
    tl.store(own, state, mask=inside)


def _advance_states(
    weights: DeltaWeights, inputs: tuple[torch.Tensor, ...], packed: Packed, states: torch.Tensor, slots: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return outputs `[t, v, v_dim]` for x, a, and b, and update `states` in their slots. `kept` are (e, states before spans) to write."""
    heads, (x, a, b) = weights.heads, inputs
    q, k, decay, beta = prepare(weights, x, a, b)
    out = torch.empty(len(x), heads.v, heads.v_dim, dtype=x.dtype, device=x.device)
    errors, spans = kept or (states, states)
    columns = min(_STATE_COLUMNS, triton.next_power_of_2(heads.v_dim))
    advance_state[(triton.cdiv(heads.v_dim, columns), heads.v, len(slots))](
        q, k, x, decay, beta, states, slots, out, errors, spans, packed.starts, packed.span_starts, int(kept is not None),
        V_TILE=columns, SPAN=SPAN, **name_sizes(heads), **STATE_LAUNCH,
    )  # fmt: skip
    return out


class _Attend(torch.autograd.Function):
    """`mixed` [t, c], or with a norm [t, c + v v_dim], whose last columns are gates. Both gradients then share one tensor, which is that of
    the projection."""

    @staticmethod
    def forward(ctx: Any, lengths: Sequence[int], heads: DeltaHeads, eps: float, mixed: torch.Tensor, *others: Any) -> torch.Tensor:
        mixed = align_rows(mixed)
        a, b, conv, a_log, dt_bias, norm = others = tuple(None if each is None else align(each) for each in others)
        packed, weights = pack(tuple(lengths), mixed.device), DeltaWeights(conv, a_log, dt_bias, heads)
        own, z = _divide(mixed, heads)
        state = heads.v, heads.k_dim, heads.v_dim
        states = torch.empty(len(lengths), *state, device=mixed.device)
        errors = torch.empty(len(mixed), heads.v, heads.v_dim, device=mixed.device)
        spans = torch.empty(len(packed.spans), *state, device=mixed.device)
        x = convolve(own, conv, own, packed.fresh, packed)
        out = _advance_states(weights, (x, a, b), packed, states, packed.fresh, (errors, spans))
        ctx.save_for_backward(mixed, *others, x, errors, spans, None if norm is None else out, *packed)
        ctx.heads, ctx.eps = heads, eps
        return out if norm is None else run_gate_norm(out, z, norm, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mixed, a, b, conv, a_log, dt_bias, norm, x, errors, spans, out, *places = ctx.saved_tensors
        packed, weights = Packed(*places), DeltaWeights(conv, a_log, dt_bias, ctx.heads)
        of_mixed, of_norm = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device), None
        (own, z), (of_own, of_z) = (_divide(each, ctx.heads) for each in (mixed, of_mixed))
        if norm is not None:
            gradient, of_norm = differentiate_gates(out, z, norm, ctx.eps, gradient, of_z)
        of_x, *others = differentiate(weights, (x, a, b), packed, (errors, spans), align(gradient))
        of_conv = differentiate_convolution(own, conv, packed, of_x, of_own)
        return None, None, None, of_mixed, *others[:2], of_conv, *others[2:], of_norm


def _divide(mixed: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the inputs of the convolution `[t, c]`, and of the gates `[t, v, v_dim]`, if there are any."""
    channels = sum(heads.widths)
    return mixed[:, :channels], mixed[:, channels:].unflatten(1, (-1, heads.v_dim))


def attend(weights: DeltaWeights, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Compute `kernels.gated_delta.reference.attend`."""
    return _Attend.apply(lengths, weights.heads, 0.0, mixed, a, b, *weights[:3], None)


def attend_gated(
    weights: DeltaWeights, norm: tuple[torch.Tensor, float], qkvz: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Compute `kernels.gated_delta.reference.attend_gated`."""
    return _Attend.apply(lengths, weights.heads, norm[1], qkvz, a, b, *weights[:3], norm[0])


def advance(
    weights: DeltaWeights, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int], slots: torch.Tensor,
    windows: torch.Tensor, states: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute `kernels.gated_delta.reference.advance`."""
    mixed, a, b = (align_rows(x) for x in (mixed, a, b))
    weights = DeltaWeights(align(weights.conv), align(weights.a_log), align(weights.dt_bias), weights.heads)
    packed = pack(tuple(lengths), mixed.device)
    x = convolve(mixed, weights.conv, windows, slots, packed)
    move_windows(mixed, windows, slots, packed.starts)
    return _advance_states(weights, (x, a, b), packed, states, slots)
