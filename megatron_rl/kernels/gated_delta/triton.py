"""The Triton kernels of `kernels.gated_delta.reference`: the recurrence and its gradients, after the convolution of `triton_convolution`.

`advance_state` is one kernel for training, prompts, and decoded tokens, compiled once: it always reads and writes a state for each
sequence, no argument that differs between these uses is a compile-time constant, and pointers are aligned. Another specialization could add
in another order. A program keeps some columns of a head's state in registers from a sequence's first token to its last. All rows of these
columns are in one program, so a share of the heads has the bits of all.

The backward pass computes the states of `SPAN` tokens again, writes them to memory, and reads them in reverse order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.gated_delta import NORM_EPS, DeltaHeads, DeltaWeights
from megatron_rl.kernels.gated_delta.triton_convolution import Packed, convolve, differentiate_convolution, move_windows, pack
from megatron_rl.kernels.gates.triton import align, align_rows, differentiate_gates, run_gate_norm
from parallel.attention.gated_delta_net import SPAN

STATE_LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}
BACKWARD_LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
_STATE_COLUMNS = 16  # columns of v_dim of a program
_BACKWARD_COLUMNS = 64
_GROUPS = 8  # programs of a head and its columns in the backward pass; each computes every eighth sequence


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _load_normed(x, K_DIM: tl.constexpr, K_TILE: tl.constexpr, EPS: tl.constexpr):
    """Return a query or key as float32 [K_TILE], and 1 / sqrt(sum of squares + EPS)."""
    row = tl.arange(0, K_TILE)
    values = tl.load(x + row, mask=row < K_DIM, other=0.0).to(tl.float32)
    return values, tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=0) + EPS))


@triton.jit
def _load_gates(a, b, a_log, dt_bias, place, head):
    """Return (rate, softplus, its input, decay, beta) of a token and a head, scalars."""
    total = tl.load(a + place).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    rate, grown = tl.exp(tl.load(a_log + head).to(tl.float32)), _softplus(total)
    beta = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(b + place).to(tl.float32)))
    return rate, grown, total, tl.exp(-(rate * grown)), beta


@triton.jit(do_not_specialize=["keeps"])
def advance_state(
    x, a, b, a_log, dt_bias, states, out, errors, kept, starts, span_starts, keeps, SCALE: tl.constexpr, K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, EPS: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """One program for V_TILE columns of a head of a sequence. `states` [n, V_HEADS, K_DIM, V_DIM] are updated. If `keeps`, e is written to
    `errors` [t, V_HEADS, V_DIM] and the state before each span to `kept` [spans, V_HEADS, K_DIM, V_DIM]."""
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, column = tl.arange(0, K_TILE), tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    k_head = head // (V_HEADS // K_HEADS)
    place, inside = row[:, None] * V_DIM + column[None, :], (row < K_DIM)[:, None] & (column < V_DIM)[None, :]
    state = tl.load(states + (sequence * V_HEADS + head) * K_DIM * V_DIM + place, mask=inside, other=0.0)
    start = tl.load(starts + sequence).to(tl.int64)
    span = tl.load(span_starts + sequence).to(tl.int64)
    for step in range(tl.load(starts + sequence + 1) - start):
        token = start + step
        if (keeps != 0) & (step % SPAN == 0):
            tl.store(kept + ((span + step // SPAN) * V_HEADS + head) * K_DIM * V_DIM + place, state, mask=inside)
        q, q_norm = _load_normed(x + token * channels + k_head * K_DIM, K_DIM, K_TILE, EPS)
        k, k_norm = _load_normed(x + token * channels + (K_HEADS + k_head) * K_DIM, K_DIM, K_TILE, EPS)
        v_place = token * channels + 2 * K_HEADS * K_DIM + head * V_DIM + column
        v = tl.load(x + v_place, mask=column < V_DIM, other=0.0).to(tl.float32)
        _, _, _, decay, beta = _load_gates(a, b, a_log, dt_bias, token * V_HEADS + head, head)
        q, k = q * q_norm * SCALE, k * k_norm
        state = state * decay
        error = v - tl.sum(state * k[:, None], axis=0)
        state = state + k[:, None] * (error * beta)[None, :]
        result = (token * V_HEADS + head) * V_DIM + column
        tl.store(out + result, tl.sum(state * q[:, None], axis=0).to(out.dtype.element_ty), mask=column < V_DIM)
        if keeps != 0:
            tl.store(errors + result, error, mask=column < V_DIM)
    tl.store(states + (sequence * V_HEADS + head) * K_DIM * V_DIM + place, state, mask=inside)


@triton.jit(do_not_specialize=["count", "tokens"])
def differentiate_states(
    x, a, b, a_log, dt_bias, gradient, errors, kept, scratch, of_x, of_heads, of_gates, starts, span_starts, count, tokens,
    SCALE: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr,
    V_TILE: tl.constexpr, EPS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program for V_TILE columns of a head, for every num_programs(2)-th of `count` sequences. It writes the gradients of values to
    `of_x` [t, channels], its part of those of normed queries and keys to `of_heads` float32 [2, programs(0), t, V_HEADS, K_DIM], and its
    part of those of decay and beta to `of_gates` float32 [2, programs(0), t, V_HEADS]. `scratch` is float32 [programs(2), V_HEADS, SPAN,
    K_DIM, V_DIM]."""
    head, group = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, column = tl.arange(0, K_TILE), tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    size: tl.constexpr = K_DIM * V_DIM
    k_head = head // (V_HEADS // K_HEADS)
    place, inside = row[:, None] * V_DIM + column[None, :], (row < K_DIM)[:, None] & (column < V_DIM)[None, :]
    own = scratch + (group * V_HEADS + head) * SPAN * size + place
    part, parts = tl.program_id(0).to(tl.int64) * tokens, tl.num_programs(0).to(tl.int64) * tokens
    for sequence in range(group, count, tl.num_programs(2)):
        start, span = tl.load(starts + sequence).to(tl.int64), tl.load(span_starts + sequence).to(tl.int64)
        spans, end = tl.load(span_starts + sequence + 1) - span, tl.load(starts + sequence + 1).to(tl.int64)
        of_state = tl.load(own, mask=inside & (count < 0), other=0.0)  # zeros, in the layout of registers of the states that are read
        for back in range(spans):
            number = spans - 1 - back
            first = start + number * SPAN
            length = min(end - first, SPAN)
            state = tl.load(kept + ((span + number) * V_HEADS + head) * size + place, mask=inside, other=0.0)
            tl.debug_barrier()
            for step in range(length):
                token = first + step
                tl.store(own + step * size, state, mask=inside)
                k, k_norm = _load_normed(x + token * channels + (K_HEADS + k_head) * K_DIM, K_DIM, K_TILE, EPS)
                _, _, _, decay, beta = _load_gates(a, b, a_log, dt_bias, token * V_HEADS + head, head)
                e = tl.load(errors + (token * V_HEADS + head) * V_DIM + column, mask=column < V_DIM, other=0.0)
                state = state * decay + (k * k_norm)[:, None] * (e * beta)[None, :]
            tl.debug_barrier()
            for step_back in range(length):
                step = length - 1 - step_back
                token = first + step
                q, q_norm = _load_normed(x + token * channels + k_head * K_DIM, K_DIM, K_TILE, EPS)
                k, k_norm = _load_normed(x + token * channels + (K_HEADS + k_head) * K_DIM, K_DIM, K_TILE, EPS)
                _, _, _, decay, beta = _load_gates(a, b, a_log, dt_bias, token * V_HEADS + head, head)
                q, k = q * q_norm * SCALE, k * k_norm
                value = (token * V_HEADS + head) * V_DIM + column
                e = tl.load(errors + value, mask=column < V_DIM, other=0.0)
                dy = tl.load(gradient + value, mask=column < V_DIM, other=0.0).to(tl.float32)
                before = tl.load(own + step * size, mask=inside, other=0.0)
                of_q = decay * tl.sum(before * dy[None, :], axis=1) + k * tl.sum(e * beta * dy, axis=0)  # of the state after the token
                of_state += q[:, None] * dy[None, :]
                of_k = tl.sum(of_state * (e * beta)[None, :], axis=1)
                of_delta = tl.sum(of_state * k[:, None], axis=0)
                of_v = of_delta * beta
                gates = of_gates + (part + token) * V_HEADS + head
                tl.store(gates + parts * V_HEADS, tl.sum(of_delta * e, axis=0))
                v_place = token * channels + 2 * K_HEADS * K_DIM + head * V_DIM + column
                tl.store(of_x + v_place, of_v.to(of_x.dtype.element_ty), mask=column < V_DIM)
                of_state -= k[:, None] * of_v[None, :]
                of_k -= decay * tl.sum(before * of_v[None, :], axis=1)
                heads = of_heads + ((part + token) * V_HEADS + head) * K_DIM + row
                tl.store(heads, of_q, mask=row < K_DIM)
                tl.store(heads + parts * V_HEADS * K_DIM, of_k, mask=row < K_DIM)
                tl.store(gates, tl.sum(tl.sum(of_state * before, axis=1), axis=0))
                of_state = of_state * decay


@triton.jit
def _differentiate_normed(source, result, of_normed, factor, K_DIM: tl.constexpr, K_TILE: tl.constexpr, EPS: tl.constexpr):
    """Write the gradient of a query or key for the gradient of factor times the normed one."""
    row = tl.arange(0, K_TILE)
    values, norm = _load_normed(source, K_DIM, K_TILE, EPS)
    dy = of_normed * factor
    gradient = norm * (dy - values * (norm * norm * tl.sum(dy * values, axis=0)))
    tl.store(result + row, gradient.to(result.dtype.element_ty), mask=row < K_DIM)


@triton.jit(do_not_specialize=["tokens"])
def differentiate_inputs(
    x, a, b, a_log, dt_bias, of_heads, of_gates, of_x, of_a, of_b, of_rates, of_biases, tokens, PARTS: tl.constexpr, SCALE: tl.constexpr,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One program for a key head of a token: gradients of queries and keys in `of_x`, of a and b [t, V_HEADS], and, float32, the token's
    part of those of a_log and dt_bias."""
    token, k_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, K_TILE)
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    of_q, of_k = tl.zeros([K_TILE], tl.float32), tl.zeros([K_TILE], tl.float32)
    for share in tl.static_range(V_HEADS // K_HEADS):
        head = k_head * (V_HEADS // K_HEADS) + share
        of_decay, of_beta = 0.0, 0.0
        for part in tl.static_range(PARTS):
            place = (part * tokens.to(tl.int64) + token) * V_HEADS + head
            other = PARTS * tokens.to(tl.int64) * V_HEADS
            of_q += tl.load(of_heads + place * K_DIM + row, mask=row < K_DIM, other=0.0)
            of_k += tl.load(of_heads + (place + other) * K_DIM + row, mask=row < K_DIM, other=0.0)
            of_decay += tl.load(of_gates + place)
            of_beta += tl.load(of_gates + place + other)
        place = token * V_HEADS + head
        rate, grown, total, decay, beta = _load_gates(a, b, a_log, dt_bias, place, head)
        of_log = of_decay * decay
        of_total = -of_log * rate * tl.div_rn(1.0, 1.0 + tl.exp(-total))
        tl.store(of_rates + place, -of_log * rate * grown)
        tl.store(of_biases + place, of_total)
        tl.store(of_a + place, of_total.to(of_a.dtype.element_ty))
        tl.store(of_b + place, (of_beta * beta * (1.0 - beta)).to(of_b.dtype.element_ty))
    query, key = token * channels + k_head * K_DIM, token * channels + (K_HEADS + k_head) * K_DIM
    _differentiate_normed(x + query, of_x + query, of_q, SCALE, K_DIM, K_TILE, EPS)
    _differentiate_normed(x + key, of_x + key, of_k, 1.0, K_DIM, K_TILE, EPS)


def _name_sizes(heads: DeltaHeads) -> dict[str, Any]:
    """Return compile-time constants that all uses of the recurrence share."""
    sizes = {"K_HEADS": heads.k, "V_HEADS": heads.v, "K_DIM": heads.k_dim, "V_DIM": heads.v_dim}
    return {**sizes, "K_TILE": triton.next_power_of_2(heads.k_dim), "SCALE": heads.k_dim**-0.5, "EPS": NORM_EPS}


def _advance_states(
    weights: DeltaWeights, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, packed: Packed, states: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return outputs `[t, v, v_dim]` and update `states`. `kept` are (e, states before spans) to write."""
    heads = weights.heads
    out = torch.empty(len(x), heads.v, heads.v_dim, dtype=x.dtype, device=x.device)
    errors, spans = kept or (states, states)
    columns = min(_STATE_COLUMNS, triton.next_power_of_2(heads.v_dim))
    advance_state[(triton.cdiv(heads.v_dim, columns), heads.v, len(states))](
        x, a, b, weights.a_log, weights.dt_bias, states, out, errors, spans, packed.starts, packed.span_starts, int(kept is not None),
        V_TILE=columns, SPAN=SPAN, **_name_sizes(heads), **STATE_LAUNCH,
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
        states = torch.zeros(len(lengths), *state, device=mixed.device)
        errors = torch.empty(len(mixed), heads.v, heads.v_dim, device=mixed.device)
        spans = torch.empty(sum(-(-length // SPAN) for length in lengths), *state, device=mixed.device)
        x = convolve(own, conv, mixed.new_zeros(len(lengths), own.shape[1], conv.shape[1] - 1), packed)
        out = _advance_states(weights, x, a, b, packed, states, (errors, spans))
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
        of_x, *others = _differentiate_recurrence(weights, (x, a, b), packed, (errors, spans), align(gradient))
        of_conv = differentiate_convolution(own, conv, packed, of_x, of_own)
        return None, None, None, of_mixed, *others[:2], of_conv, *others[2:], of_norm


def _divide(mixed: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the inputs of the convolution `[t, c]`, and of the gates `[t, v, v_dim]`, if there are any."""
    channels = sum(heads.widths)
    return mixed[:, :channels], mixed[:, channels:].unflatten(1, (-1, heads.v_dim))


def _differentiate_recurrence(
    weights: DeltaWeights,
    inputs: tuple[torch.Tensor, ...],
    packed: Packed,
    kept: tuple[torch.Tensor, torch.Tensor],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of x, a, b, a_log, and dt_bias for that of the outputs."""
    heads, (x, a, b), tokens, count = weights.heads, inputs, len(inputs[0]), len(packed.starts) - 1
    columns, groups = min(_BACKWARD_COLUMNS, triton.next_power_of_2(heads.v_dim)), min(count, _GROUPS)
    parts, constants, gates = triton.cdiv(heads.v_dim, columns), _name_sizes(heads), (weights.a_log, weights.dt_bias)
    of_x, of_a, of_b = (torch.empty_like(each) for each in inputs)
    scratch = torch.empty(groups, heads.v, SPAN, heads.k_dim, heads.v_dim, device=x.device)
    of_heads = torch.empty(2, parts, tokens, heads.v, heads.k_dim, device=x.device)
    of_gates = torch.empty(2, parts, tokens, heads.v, device=x.device)
    of_rates, of_biases = torch.empty(2, tokens, heads.v, device=x.device)
    differentiate_states[(parts, heads.v, groups)](
        x, a, b, *gates, gradient, *kept, scratch, of_x, of_heads, of_gates, packed.starts, packed.span_starts, count, tokens,
        V_TILE=columns, SPAN=SPAN, **constants, **BACKWARD_LAUNCH,
    )  # fmt: skip
    differentiate_inputs[(tokens, heads.k)](
        x, a, b, *gates, of_heads, of_gates, of_x, of_a, of_b, of_rates, of_biases, tokens, PARTS=parts, **constants, **STATE_LAUNCH
    )  # fmt: skip
    return of_x, of_a, of_b, *(each.sum(0).to(weight.dtype) for each, weight in zip((of_rates, of_biases), gates, strict=True))


def attend(weights: DeltaWeights, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Compute `kernels.gated_delta.reference.attend`."""
    return _Attend.apply(lengths, weights.heads, 0.0, mixed, a, b, *weights[:3], None)


def attend_gated(
    weights: DeltaWeights, norm: tuple[torch.Tensor, float], qkvz: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Compute `kernels.gated_delta.reference.attend_gated`."""
    return _Attend.apply(lengths, weights.heads, norm[1], qkvz, a, b, *weights[:3], norm[0])


def advance(
    weights: DeltaWeights, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int], windows: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `kernels.gated_delta.reference.advance`."""
    mixed, a, b, windows = (align(x) for x in (mixed, a, b, windows))
    weights = DeltaWeights(align(weights.conv), align(weights.a_log), align(weights.dt_bias), weights.heads)
    packed, last = pack(tuple(lengths), mixed.device), windows.shape[-1]
    states = states.clone(memory_format=torch.contiguous_format)
    x = convolve(mixed, weights.conv, windows, packed)
    out = _advance_states(weights, x, a, b, packed, states)
    return out, move_windows(mixed, windows, packed.starts.long(), last), states
