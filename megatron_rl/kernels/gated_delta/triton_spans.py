"""The Triton kernels of the recurrence's gradient, by the formulas of `kernels.gated_delta.spans`.

`solve_span` computes for all spans at once what does not depend on the state's gradient: w = (I + U)^-1 h K, and of the gradient of d the part
(I + U)^-1 (G * Q K^T)^T dO. `carry_gradient` goes from the last span of a sequence to the first, and `differentiate_span` finishes all spans
at once. Products have FP32 operands, of which tensor cores multiply three pairs of TF32 parts: the error is that of FP32 sums, 2^-21.
"""

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.gated_delta import NORM_EPS, DeltaWeights
from megatron_rl.kernels.gated_delta.triton_inputs import load_gates, name_sizes, prepare
from megatron_rl.kernels.gated_delta.triton_convolution import Packed
from parallel.attention.gated_delta_net import SPAN

PRODUCTS = tl.constexpr("tf32x3")
_SOLVE_LAUNCH = {"num_warps": 8}
_CARRY_LAUNCH = {"num_warps": 8}
_FINISH_LAUNCH = {"num_warps": 8}
_CARRY_COLUMNS = 32  # columns of v_dim of a program of `carry_gradient`
_FINISH_COLUMNS = 32  # columns that `differentiate_span` loads at once
_BLOCK = 16  # tokens whose triangular system is solved token by token


@triton.jit
def _multiply(left, right):
    return tl.dot(left, right, input_precision=PRODUCTS)


@triton.jit
def _load_rows(x, token, stride, column, inside, width):
    """Return float32 [SPAN, columns] of rows `token` of a tensor."""
    return tl.load(x + token[:, None] * stride + column[None, :], mask=inside[:, None] & (column < width)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _find_ratios(decay, place, inside, SPAN: tl.constexpr):
    """Return G^T, g, h, and g of the last token, of a span and a head; `place` are its tokens' numbers in `decay`."""
    row, shares = tl.arange(0, SPAN), tl.load(decay + place, mask=inside, other=1.0)
    later = row[:, None] < row[None, :]
    ratio = tl.where(row[:, None] <= row[None, :], tl.cumprod(tl.where(later, shares[None, :], 1.0), axis=1), 0.0)
    start, last = tl.cumprod(shares, axis=0), row == SPAN - 1
    return ratio, start, tl.sum(tl.where(last[None, :], ratio, 0.0), axis=1), tl.sum(tl.where(last, start, 0.0), axis=0)


@triton.jit
def _invert(upper, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Return (I + upper)^-1 for numbers above the diagonal: blocks of BLOCK tokens from their last token to the first, then blocks above
    them. No power of `upper` is computed, which may be huge where keys are alike."""
    row = tl.arange(0, SPAN)
    within = row[:, None] // BLOCK == row[None, :] // BLOCK
    diagonal, near = tl.where(row[:, None] == row[None, :], 1.0, 0.0), tl.where(within, upper, 0.0)
    blocks = tl.zeros([SPAN, SPAN], tl.float32)
    for back in range(BLOCK):
        current = (row % BLOCK == BLOCK - 1 - back)[:, None]  # a row of each block
        weights = tl.sum(tl.where(current, near, 0.0), axis=0)
        known = tl.sum(weights[:, None] * blocks, axis=0)
        blocks = tl.where(current & within, diagonal - known[None, :], blocks)
    far, result = _multiply(blocks, tl.where(within, 0.0, upper)), blocks
    for _ in tl.static_range(SPAN // BLOCK - 1):
        result = blocks - _multiply(far, result)
    return result


@triton.jit
def solve_span(
    q, k, decay, beta, gradient, passed, of_delta, spans, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a span and a head: w is written to `passed` [t, V_HEADS, K_DIM], the other part to `of_delta` [t, V_HEADS, V_DIM]."""
    span, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column, value = tl.arange(0, SPAN), tl.arange(0, K_TILE), tl.arange(0, V_TILE)
    first = tl.load(spans + 2 * span).to(tl.int64)
    token, inside = first + row, first + row < tl.load(spans + 2 * span + 1)
    place = token * V_HEADS + head
    keys = token * K_HEADS + head // (V_HEADS // K_HEADS)
    ratio, _, end, _ = _find_ratios(decay, place, inside, SPAN)
    key = _load_rows(k, keys, K_DIM, column, inside, K_DIM)
    query = _load_rows(q, keys, K_DIM, column, inside, K_DIM)
    scores = ratio * _multiply(key, tl.trans(query))
    shares = tl.load(beta + place, mask=inside, other=0.0)
    upper = tl.where(row[:, None] < row[None, :], ratio * _multiply(key, tl.trans(key)) * shares[None, :], 0.0)
    inverse = _invert(upper, SPAN, BLOCK)
    written = inside[:, None] & (column < K_DIM)[None, :]
    tl.store(passed + place[:, None] * K_DIM + column[None, :], _multiply(inverse, end[:, None] * key), mask=written)
    right = _multiply(scores, _load_rows(gradient, place, V_DIM, value, inside, V_DIM))
    written = inside[:, None] & (value < V_DIM)[None, :]
    tl.store(of_delta + place[:, None] * V_DIM + value[None, :], _multiply(inverse, right), mask=written)


@triton.jit
def carry_gradient(
    q, k, decay, beta, gradient, passed, of_delta, of_states, spans, span_starts, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program for V_TILE columns of a head of a sequence. It completes `of_delta`, and writes the gradients of the states behind spans to
    `of_states` [spans, V_HEADS, K_DIM, V_DIM]."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column, value = tl.arange(0, SPAN), tl.arange(0, K_TILE), tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    state = column[:, None] * V_DIM + value[None, :]
    within = (column < K_DIM)[:, None] & (value < V_DIM)[None, :]
    begin, end = tl.load(span_starts + sequence).to(tl.int64), tl.load(span_starts + sequence + 1).to(tl.int64)
    of_state = tl.zeros([K_TILE, V_TILE], tl.float32)
    for back in range(end - begin):
        span = end - 1 - back
        first = tl.load(spans + 2 * span).to(tl.int64)
        token, inside = first + row, first + row < tl.load(spans + 2 * span + 1)
        place = token * V_HEADS + head
        keys = token * K_HEADS + head // (V_HEADS // K_HEADS)
        tl.store(of_states + (span * V_HEADS + head) * K_DIM * V_DIM + state, of_state, mask=within)
        of_d = _load_rows(of_delta, place, V_DIM, value, inside, V_DIM)
        of_d += _multiply(_load_rows(passed, place, K_DIM, column, inside, K_DIM), of_state)
        tl.store(of_delta + place[:, None] * V_DIM + value[None, :], of_d, mask=inside[:, None] & (value < V_DIM)[None, :])
        start = tl.cumprod(tl.load(decay + place, mask=inside, other=1.0), axis=0)
        shares = start * tl.load(beta + place, mask=inside, other=0.0)
        of_state *= tl.sum(tl.where(row == SPAN - 1, start, 0.0), axis=0)
        query = start[:, None] * _load_rows(q, keys, K_DIM, column, inside, K_DIM)
        of_state += _multiply(tl.trans(query), _load_rows(gradient, place, V_DIM, value, inside, V_DIM))
        key = shares[:, None] * _load_rows(k, keys, K_DIM, column, inside, K_DIM)
        of_state -= _multiply(tl.trans(key), of_d)


@triton.jit
def _differentiate_normed(x, result, token, inside, of_normed, factor, K_DIM: tl.constexpr, K_TILE: tl.constexpr, STRIDE: tl.constexpr,
                          EPS: tl.constexpr):  # fmt: skip
    """Write the gradients of queries or keys for those of factor times the normalized ones."""
    column = tl.arange(0, K_TILE)
    values = _load_rows(x, token, STRIDE, column, inside, K_DIM)
    norm = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=1) + EPS))
    dy = of_normed * factor
    of_values = norm[:, None] * (dy - values * (norm * norm * tl.sum(dy * values, axis=1))[:, None])
    place = token[:, None] * STRIDE + column[None, :]
    tl.store(result + place, of_values.to(result.dtype.element_ty), mask=inside[:, None] & (column < K_DIM)[None, :])


@triton.jit(do_not_specialize=["a_stride", "b_stride"])
def differentiate_span(
    x, a, b, a_log, dt_bias, q, k, decay, beta, gradient, errors, states, of_delta, of_states, spans, of_x, of_a, of_b, of_rates, of_biases,
    a_stride, b_stride, SCALE: tl.constexpr, EPS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program for a span and a key head with its value heads: the gradients of x [t, channels], of a and b [t, V_HEADS], and, float32,
    each token's part of those of a_log and dt_bias."""
    span, k_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, SPAN), tl.arange(0, K_TILE)
    first = tl.load(spans + 2 * span).to(tl.int64)
    token, inside = first + row, first + row < tl.load(spans + 2 * span + 1)
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    later = row[:, None] < row[None, :]
    of_q, of_k = tl.zeros([SPAN, K_TILE], tl.float32), tl.zeros([SPAN, K_TILE], tl.float32)
    for share in range(V_HEADS // K_HEADS):
        head = k_head * (V_HEADS // K_HEADS) + share
        place = token * V_HEADS + head
        ratio, start, end, last = _find_ratios(decay, place, inside, SPAN)
        shares = tl.load(beta + place, mask=inside, other=0.0)
        query = _load_rows(q, token * K_HEADS + k_head, K_DIM, column, inside, K_DIM)
        key = _load_rows(k, token * K_HEADS + k_head, K_DIM, column, inside, K_DIM)
        kept, lost = tl.zeros([SPAN, SPAN], tl.float32), tl.zeros([SPAN, SPAN], tl.float32)
        read, sent, of_beta, whole = tl.zeros([SPAN], tl.float32), tl.zeros([SPAN], tl.float32), tl.zeros([SPAN], tl.float32), 0.0
        for part in range(0, V_DIM, V_TILE):
            value = part + tl.arange(0, V_TILE)
            dy = _load_rows(gradient, place, V_DIM, value, inside, V_DIM)
            e = _load_rows(errors, place, V_DIM, value, inside, V_DIM)
            of_d = _load_rows(of_delta, place, V_DIM, value, inside, V_DIM)
            delta, of_v = shares[:, None] * e, shares[:, None] * of_d
            of_beta += tl.sum(e * of_d, axis=1)
            written = inside[:, None] & (value < V_DIM)[None, :]
            v_place = token[:, None] * channels + 2 * K_HEADS * K_DIM + head * V_DIM + value[None, :]
            tl.store(of_x + v_place, of_v.to(of_x.dtype.element_ty), mask=written)
            kept += _multiply(delta, tl.trans(dy))
            lost += _multiply(delta, tl.trans(of_v))
            number = ((span * V_HEADS + head) * K_DIM + column)[:, None] * V_DIM + value[None, :]
            within = (column < K_DIM)[:, None] & (value < V_DIM)[None, :]
            before, behind = tl.load(states + number, mask=within, other=0.0), tl.load(of_states + number, mask=within, other=0.0)
            whole += tl.sum(tl.sum(before * behind, axis=1), axis=0)
            added = _multiply(start[:, None] * dy, tl.trans(before))
            of_q += added
            read += tl.sum(added * query, axis=1)
            added = _multiply(start[:, None] * of_v, tl.trans(before))
            of_k -= added
            read -= tl.sum(added * key, axis=1)
            added = _multiply(end[:, None] * delta, tl.trans(behind))
            of_k += added
            sent += tl.sum(added * key, axis=1)
        kept, lost = ratio * kept, tl.where(later, ratio * lost, 0.0)
        of_q += _multiply(tl.trans(kept), key)
        of_k += _multiply(kept, query) - _multiply(lost + tl.trans(lost), key)
        crossing = tl.where(later, kept * _multiply(key, tl.trans(query)) - lost * _multiply(key, tl.trans(key)), 0.0)
        of_log = tl.sum(tl.where(later, tl.cumsum(crossing, axis=1, reverse=True), 0.0), axis=0)
        of_log += tl.cumsum(read, axis=0, reverse=True) + last * whole
        of_log += tl.sum(tl.where(later, sent[:, None], 0.0), axis=0)
        gates = load_gates(a, b, a_log, dt_bias, token * a_stride + head, token * b_stride + head, head, inside)
        of_total = -of_log * gates[0] * tl.div_rn(1.0, 1.0 + tl.exp(-gates[2]))
        tl.store(of_rates + place, -of_log * gates[0] * gates[1], mask=inside)
        tl.store(of_biases + place, of_total, mask=inside)
        tl.store(of_a + place, of_total.to(of_a.dtype.element_ty), mask=inside)
        tl.store(of_b + place, (of_beta * shares * (1.0 - shares)).to(of_b.dtype.element_ty), mask=inside)
    _differentiate_normed(x + k_head * K_DIM, of_x + k_head * K_DIM, token, inside, of_q, SCALE, K_DIM, K_TILE, channels, EPS)
    own = (K_HEADS + k_head) * K_DIM
    _differentiate_normed(x + own, of_x + own, token, inside, of_k, 1.0, K_DIM, K_TILE, channels, EPS)


def differentiate(
    weights: DeltaWeights, inputs: tuple[torch.Tensor, ...], packed: Packed, kept: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x, a, b, a_log, and dt_bias for that of the outputs. `kept` are (e, states before spans)."""
    heads, (x, a, b), gates, spans = weights.heads, inputs, (weights.a_log, weights.dt_bias), len(packed.spans)
    prepared, constants, width = prepare(weights, x, a, b), {**name_sizes(heads), "SPAN": SPAN}, triton.next_power_of_2(heads.v_dim)
    of_x, of_a, of_b = torch.empty_like(x), *(torch.empty(each.shape, dtype=each.dtype, device=x.device) for each in (a, b))
    of_rates, of_biases = torch.empty(2, len(x), heads.v, device=x.device)
    passed, of_delta = (torch.empty(len(x), heads.v, dim, device=x.device) for dim in (heads.k_dim, heads.v_dim))
    of_states = torch.empty_like(kept[1])
    solve_span[(spans, heads.v)](
        *prepared, gradient, passed, of_delta, packed.spans, V_TILE=width, BLOCK=min(_BLOCK, SPAN), **constants, **_SOLVE_LAUNCH
    )
    columns = min(_CARRY_COLUMNS, width)
    carry_gradient[(triton.cdiv(heads.v_dim, columns), heads.v, len(packed.starts) - 1)](
        *prepared, gradient, passed, of_delta, of_states, packed.spans, packed.span_starts, V_TILE=columns, **constants, **_CARRY_LAUNCH
    )
    differentiate_span[(spans, heads.k)](
        x, a, b, *gates, *prepared, gradient, *kept, of_delta, of_states, packed.spans, of_x, of_a, of_b, of_rates, of_biases,
        a.stride(0), b.stride(0), V_TILE=min(_FINISH_COLUMNS, width), SCALE=heads.k_dim**-0.5, EPS=NORM_EPS, **constants, **_FINISH_LAUNCH,
    )  # fmt: skip
    return of_x, of_a, of_b, *(each.sum(0).to(weight.dtype) for each, weight in zip((of_rates, of_biases), gates, strict=True))
