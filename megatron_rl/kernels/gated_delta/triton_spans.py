"""The Triton kernels of the recurrence's gradient, by the formulas of `kernels.gated_delta.spans`.

`solve_span` computes for all spans at once what does not depend on the state's gradient: w = (I + U)^-1 h K, and of the gradient of d
the part (I + U)^-1 (G * Q K^T)^T dO. `carry_gradient` goes from the last span of a sequence to the first, and `differentiate_span`
finishes all spans at once. Products have FP32 operands, of which tensor cores multiply three pairs of BF16 parts and add in FP32: the error
is 2^-16, of gradients that are rounded to 2^-9. Three pairs of TF32 parts would spill registers.
"""

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.gated_delta import NORM_EPS, DeltaWeights
from megatron_rl.kernels.gated_delta.triton_convolution import Packed
from megatron_rl.kernels.gated_delta.triton_inputs import load_gates, name_sizes, prepare
from parallel.attention.gated_delta_net import SPAN

PRODUCTS = tl.constexpr("bf16x3")
_SOLVE_LAUNCH = {"num_warps": 4, "num_stages": 1}
_CARRY_LAUNCH = {"num_warps": 8, "num_stages": 1}
_FINISH_LAUNCH = {"num_warps": 8, "num_stages": 1}
_NORM_LAUNCH = {"num_warps": 1}
_CARRY_COLUMNS = 32  # columns of v_dim of a program of `carry_gradient`
_TILE = 32  # columns that programs of other kernels load at once
_BLOCK = 16  # tokens whose triangular system is solved token by token


@triton.jit
def _multiply(left, right):
    return tl.dot(left, right, input_precision=PRODUCTS)


@triton.jit
def _load_rows(x, stride, column, length, width, SPAN: tl.constexpr):
    """Return float32 [SPAN, columns] of `length` rows that begin at x."""
    row = tl.arange(0, SPAN)
    inside = (row < length)[:, None] & (column < width)[None, :]
    return tl.load(x + (row[:, None] * stride + column[None, :]), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(x, values, stride, column, length, width, SPAN: tl.constexpr):
    """Write rows that begin at x."""
    row = tl.arange(0, SPAN)
    inside = (row < length)[:, None] & (column < width)[None, :]
    tl.store(x + (row[:, None] * stride + column[None, :]), values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _compare_rows(left, right, stride, length, width: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr):
    """Return left right^T for rows that begin at both."""
    result = tl.zeros([SPAN, SPAN], tl.float32)
    for part in range(0, width, TILE):
        column = part + tl.arange(0, TILE)
        other = _load_rows(right, stride, column, length, width, SPAN)
        result += _multiply(_load_rows(left, stride, column, length, width, SPAN), tl.trans(other))
    return result


@triton.jit
def _find_ratios(decay, stride, length, SPAN: tl.constexpr):
    """Return G^T, g, h, and g of the last token, of a span and a head, for `length` decays."""
    row = tl.arange(0, SPAN)
    shares = tl.load(decay + row * stride, mask=row < length, other=1.0)
    later = row[:, None] < row[None, :]
    ratio = tl.where(row[:, None] <= row[None, :], tl.cumprod(tl.where(later, shares[None, :], 1.0), axis=1), 0.0)
    start, last = tl.cumprod(shares, axis=0), row == SPAN - 1
    return ratio, start, tl.sum(tl.where(last[None, :], ratio, 0.0), axis=1), tl.sum(tl.where(last, start, 0.0), axis=0)


@triton.jit
def _invert(upper, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Return (I + upper)^-1 for numbers above the diagonal: blocks of BLOCK tokens from their last token to the first, then blocks above
    them. No power of `upper` is computed, which may be huge where keys are alike."""
    count: tl.constexpr = SPAN // BLOCK
    number, row = tl.arange(0, count), tl.arange(0, BLOCK)
    within = (number[:, None] == number[None, :])[:, None, :, None]
    near = tl.sum(tl.where(within, tl.reshape(upper, [count, BLOCK, count, BLOCK]), 0.0), axis=2)
    blocks = tl.zeros([count, BLOCK, BLOCK], tl.float32)
    for back in range(BLOCK):
        current = row == BLOCK - 1 - back
        weights = tl.sum(tl.where(current[None, :, None], near, 0.0), axis=1)
        solved = tl.where(current, 1.0, 0.0)[None, :] - tl.sum(weights[:, :, None] * blocks, axis=1)
        blocks = tl.where(current[None, :, None], solved[:, None, :], blocks)
    inverse = tl.reshape(tl.where(within, blocks[:, :, None, :], 0.0), [SPAN, SPAN])
    row = tl.arange(0, SPAN)
    far = _multiply(inverse, tl.where(row[:, None] // BLOCK == row[None, :] // BLOCK, 0.0, upper))
    result = inverse
    for _ in range(count - 1):
        result = inverse - _multiply(far, result)
    return result


@triton.jit
def solve_span(
    q, k, decay, beta, gradient, passed, of_delta, spans, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, K_TILE: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a span and a head: w is written to `passed` [t, V_HEADS, K_DIM], the other part to `of_delta` [t, V_HEADS, V_DIM]."""
    span, head, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, SPAN)
    first = tl.load(spans + 2 * span).to(tl.int64)
    length = tl.load(spans + 2 * span + 1) - tl.load(spans + 2 * span)
    place, keys = first * V_HEADS + head, (first * K_HEADS + head // (V_HEADS // K_HEADS)) * K_DIM
    ratio, _, end, _ = _find_ratios(decay + place, V_HEADS, length, SPAN)
    shares = tl.load(beta + place + row * V_HEADS, mask=row < length, other=0.0)
    upper = ratio * shares[None, :] * _compare_rows(k + keys, k + keys, K_HEADS * K_DIM, length, K_DIM, TILE, SPAN)
    inverse = _invert(tl.where(row[:, None] < row[None, :], upper, 0.0), SPAN, BLOCK)
    for part in range(0, K_DIM, TILE):
        column = part + tl.arange(0, TILE)
        product = _multiply(inverse, end[:, None] * _load_rows(k + keys, K_HEADS * K_DIM, column, length, K_DIM, SPAN))
        _store_rows(passed + place * K_DIM, product, V_HEADS * K_DIM, column, length, K_DIM, SPAN)
    scores = ratio * _compare_rows(k + keys, q + keys, K_HEADS * K_DIM, length, K_DIM, TILE, SPAN)
    scores = _multiply(inverse, scores)
    for part in range(0, V_DIM, TILE):
        column = part + tl.arange(0, TILE)
        product = _multiply(scores, _load_rows(gradient + place * V_DIM, V_HEADS * V_DIM, column, length, V_DIM, SPAN))
        _store_rows(of_delta + place * V_DIM, product, V_HEADS * V_DIM, column, length, V_DIM, SPAN)


@triton.jit
def carry_gradient(
    q, k, decay, beta, gradient, passed, of_delta, of_states, spans, span_starts, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program for V_TILE columns of a head of a sequence. It completes `of_delta`, and writes the gradients of the states behind spans
    to `of_states` [spans, V_HEADS, K_DIM, V_DIM]."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column, value = tl.arange(0, SPAN), tl.arange(0, K_TILE), tl.program_id(0) * V_TILE + tl.arange(0, V_TILE)
    state = column[:, None] * V_DIM + value[None, :]
    within = (column < K_DIM)[:, None] & (value < V_DIM)[None, :]
    begin, end = tl.load(span_starts + sequence).to(tl.int64), tl.load(span_starts + sequence + 1).to(tl.int64)
    of_state = tl.zeros([K_TILE, V_TILE], tl.float32)
    for back in range(end - begin):
        span = end - 1 - back
        first = tl.load(spans + 2 * span).to(tl.int64)
        length = tl.load(spans + 2 * span + 1) - tl.load(spans + 2 * span)
        place, keys = first * V_HEADS + head, (first * K_HEADS + head // (V_HEADS // K_HEADS)) * K_DIM
        own = of_states + (span * V_HEADS + head) * K_DIM * V_DIM
        tl.store(own + state, of_state, mask=within)
        of_d = _load_rows(of_delta + place * V_DIM, V_HEADS * V_DIM, value, length, V_DIM, SPAN)
        tl.debug_barrier()
        for part in range(0, K_DIM, TILE):
            rows = part + tl.arange(0, TILE)
            known = _load_rows(passed + place * K_DIM, V_HEADS * K_DIM, rows, length, K_DIM, SPAN)
            of_d += _multiply(known, _load_rows(own + part * V_DIM, V_DIM, value, K_DIM - part, V_DIM, TILE))
        _store_rows(of_delta + place * V_DIM, of_d, V_HEADS * V_DIM, value, length, V_DIM, SPAN)
        start = tl.cumprod(tl.load(decay + place + row * V_HEADS, mask=row < length, other=1.0), axis=0)
        shares = start * tl.load(beta + place + row * V_HEADS, mask=row < length, other=0.0)
        of_state *= tl.sum(tl.where(row == SPAN - 1, start, 0.0), axis=0)
        dy = _load_rows(gradient + place * V_DIM, V_HEADS * V_DIM, value, length, V_DIM, SPAN)
        query = _load_rows(q + keys, K_HEADS * K_DIM, column, length, K_DIM, SPAN)
        of_state += _multiply(tl.trans(query), start[:, None] * dy)
        tl.debug_barrier()  # registers do not hold queries and keys at once
        key = _load_rows(k + keys, K_HEADS * K_DIM, column, length, K_DIM, SPAN)
        of_state -= _multiply(tl.trans(key), shares[:, None] * of_d)


@triton.jit(do_not_specialize=["a_stride", "b_stride"])
def differentiate_span(
    a, b, a_log, dt_bias, q, k, decay, beta, gradient, errors, states, of_delta, of_states, spans, of_x, of_q, of_k, of_a, of_b, of_rates,
    of_biases, a_stride, b_stride, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_TILE: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program for a span and a head: the gradients of values in `of_x` [t, channels], of a and b [t, V_HEADS], and, float32, the head's
    part of those of normalized queries and keys [t, V_HEADS, K_DIM], and the tokens' parts of those of a_log and dt_bias."""
    span, head, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, SPAN)
    first = tl.load(spans + 2 * span).to(tl.int64)
    length = tl.load(spans + 2 * span + 1) - tl.load(spans + 2 * span)
    place, keys = first * V_HEADS + head, (first * K_HEADS + head // (V_HEADS // K_HEADS)) * K_DIM
    gradient, errors, of_delta = gradient + place * V_DIM, errors + place * V_DIM, of_delta + place * V_DIM
    states, of_states = states + (span * V_HEADS + head) * K_DIM * V_DIM, of_states + (span * V_HEADS + head) * K_DIM * V_DIM
    q, k, of_q, of_k = q + keys, k + keys, of_q + place * K_DIM, of_k + place * K_DIM
    channels: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    of_x += first * channels + 2 * K_HEADS * K_DIM + head * V_DIM
    later, shares = row[:, None] < row[None, :], tl.load(beta + place + row * V_HEADS, mask=row < length, other=0.0)
    ratio, start, end, last = _find_ratios(decay + place, V_HEADS, length, SPAN)
    of_beta, whole = tl.zeros([SPAN], tl.float32), 0.0
    for part in range(0, V_DIM, TILE):
        value = part + tl.arange(0, TILE)
        of_d = _load_rows(of_delta, V_HEADS * V_DIM, value, length, V_DIM, SPAN)
        of_beta += tl.sum(_load_rows(errors, V_HEADS * V_DIM, value, length, V_DIM, SPAN) * of_d, axis=1)
        _store_rows(of_x, shares[:, None] * of_d, channels, value, length, V_DIM, SPAN)
    kept = ratio * shares[:, None] * _compare_rows(errors, gradient, V_HEADS * V_DIM, length, V_DIM, TILE, SPAN)
    lost = ratio * shares[:, None] * shares[None, :] * _compare_rows(errors, of_delta, V_HEADS * V_DIM, length, V_DIM, TILE, SPAN)
    lost = tl.where(later, lost, 0.0)
    crossing = kept * _compare_rows(k, q, K_HEADS * K_DIM, length, K_DIM, TILE, SPAN)
    crossing -= lost * _compare_rows(k, k, K_HEADS * K_DIM, length, K_DIM, TILE, SPAN)
    of_log = tl.sum(tl.where(later, tl.cumsum(tl.where(later, crossing, 0.0), axis=1, reverse=True), 0.0), axis=0)
    lost += tl.trans(lost)
    for part in range(0, K_DIM, TILE):  # from tokens of the span
        column = part + tl.arange(0, TILE)
        key = _load_rows(k, K_HEADS * K_DIM, column, length, K_DIM, SPAN)
        _store_rows(of_q, _multiply(tl.trans(kept), key), V_HEADS * K_DIM, column, length, K_DIM, SPAN)
        inner = _multiply(kept, _load_rows(q, K_HEADS * K_DIM, column, length, K_DIM, SPAN)) - _multiply(lost, key)
        _store_rows(of_k, inner, V_HEADS * K_DIM, column, length, K_DIM, SPAN)
    tl.debug_barrier()
    read, sent = tl.zeros([SPAN], tl.float32), tl.zeros([SPAN], tl.float32)
    for k_part in range(0, K_DIM, TILE):  # from the state before the span, and from the gradient of the state behind it
        column = k_part + tl.arange(0, TILE)
        from_q, from_k, to_k = (tl.zeros([SPAN, TILE], tl.float32),) * 3
        for part in range(0, V_DIM, TILE):
            value = part + tl.arange(0, TILE)
            before = _load_rows(states + k_part * V_DIM, V_DIM, value, K_DIM - k_part, V_DIM, TILE)
            behind = _load_rows(of_states + k_part * V_DIM, V_DIM, value, K_DIM - k_part, V_DIM, TILE)
            whole += tl.sum(tl.sum(before * behind, axis=1), axis=0)
            from_q += _multiply(_load_rows(gradient, V_HEADS * V_DIM, value, length, V_DIM, SPAN), tl.trans(before))
            from_k += _multiply(_load_rows(of_delta, V_HEADS * V_DIM, value, length, V_DIM, SPAN), tl.trans(before))
            to_k += _multiply(_load_rows(errors, V_HEADS * V_DIM, value, length, V_DIM, SPAN), tl.trans(behind))
        from_q, from_k, to_k = from_q * start[:, None], from_k * (start * shares)[:, None], to_k * (end * shares)[:, None]
        key = _load_rows(k, K_HEADS * K_DIM, column, length, K_DIM, SPAN)
        read += tl.sum(from_q * _load_rows(q, K_HEADS * K_DIM, column, length, K_DIM, SPAN) - from_k * key, axis=1)
        sent += tl.sum(to_k * key, axis=1)
        from_q += _load_rows(of_q, V_HEADS * K_DIM, column, length, K_DIM, SPAN)
        _store_rows(of_q, from_q, V_HEADS * K_DIM, column, length, K_DIM, SPAN)
        to_k += _load_rows(of_k, V_HEADS * K_DIM, column, length, K_DIM, SPAN) - from_k
        _store_rows(of_k, to_k, V_HEADS * K_DIM, column, length, K_DIM, SPAN)
    of_log += tl.cumsum(read, axis=0, reverse=True) + last * whole + tl.sum(tl.where(later, sent[:, None], 0.0), axis=0)
    token, inside = first + row, row < length
    rate, grown, total, _, _ = load_gates(a, b, a_log, dt_bias, token * a_stride + head, token * b_stride + head, head, inside)
    of_total, own = -of_log * rate * tl.div_rn(1.0, 1.0 + tl.exp(-total)), token * V_HEADS + head
    tl.store(of_rates + own, -of_log * rate * grown, mask=inside)
    tl.store(of_biases + own, of_total, mask=inside)
    tl.store(of_a + own, of_total.to(of_a.dtype.element_ty), mask=inside)
    tl.store(of_b + own, (of_beta * shares * (1.0 - shares)).to(of_b.dtype.element_ty), mask=inside)


@triton.jit
def differentiate_normed(
    x, of_q, of_k, of_x, SCALE: tl.constexpr, EPS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, K_TILE: tl.constexpr,
):  # fmt: skip
    """One program for the query or the key of a head of a token: its gradient in `of_x` for those of the normalized one."""
    token, part, k_head = tl.program_id(0).to(tl.int64), tl.program_id(1) // K_HEADS, tl.program_id(1) % K_HEADS
    row, factor = tl.arange(0, K_TILE), tl.where(part == 0, SCALE, 1.0)
    inside, dy = row < K_DIM, tl.zeros([K_TILE], tl.float32)
    for share in tl.static_range(V_HEADS // K_HEADS):
        place = (token * V_HEADS + k_head * (V_HEADS // K_HEADS) + share) * K_DIM + row
        dy += tl.load(of_q + place, mask=inside & (part == 0), other=0.0) + tl.load(of_k + place, mask=inside & (part == 1), other=0.0)
    place = token * (2 * K_HEADS * K_DIM + V_HEADS * V_DIM) + tl.program_id(1) * K_DIM + row
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    norm = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=0) + EPS))
    of_values = norm * factor * (dy - values * (norm * norm * tl.sum(dy * values, axis=0)))
    tl.store(of_x + place, of_values.to(of_x.dtype.element_ty), mask=inside)


def differentiate(
    weights: DeltaWeights, inputs: tuple[torch.Tensor, ...], packed: Packed, kept: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x, a, b, a_log, and dt_bias for that of the outputs. `kept` are (e, states before spans)."""
    heads, (x, a, b), gates, spans = weights.heads, inputs, (weights.a_log, weights.dt_bias), len(packed.spans)
    prepared, constants, width = prepare(weights, x, a, b), name_sizes(heads), triton.next_power_of_2(heads.v_dim)
    of_x, of_a, of_b = torch.empty_like(x), *(torch.empty(each.shape, dtype=each.dtype, device=x.device) for each in (a, b))
    of_rates, of_biases = torch.empty(2, len(x), heads.v, device=x.device)
    passed, of_k = torch.empty(2, len(x), heads.v, heads.k_dim, device=x.device)
    of_delta, of_states = torch.empty(len(x), heads.v, heads.v_dim, device=x.device), torch.empty_like(kept[1])
    tiles = {"TILE": min(_TILE, constants["K_TILE"], width), "SPAN": SPAN, **constants}
    solve_span[(spans, heads.v)](*prepared, gradient, passed, of_delta, packed.spans, BLOCK=min(_BLOCK, SPAN), **tiles, **_SOLVE_LAUNCH)
    columns = min(_CARRY_COLUMNS, width)
    carry_gradient[(triton.cdiv(heads.v_dim, columns), heads.v, len(packed.starts) - 1)](
        *prepared, gradient, passed, of_delta, of_states, packed.spans, packed.span_starts, V_TILE=columns, **tiles,
        **_CARRY_LAUNCH,
    )  # fmt: skip
    of_q = passed  # which no kernel reads any more
    differentiate_span[(spans, heads.v)](
        a, b, *gates, *prepared, gradient, *kept, of_delta, of_states, packed.spans, of_x, of_q, of_k, of_a, of_b, of_rates, of_biases,
        a.stride(0), b.stride(0), **tiles, **_FINISH_LAUNCH,
    )  # fmt: skip
    differentiate_normed[(len(x), 2 * heads.k)](x, of_q, of_k, of_x, SCALE=heads.k_dim**-0.5, EPS=NORM_EPS, **constants, **_NORM_LAUNCH)
    return of_x, of_a, of_b, *(each.sum(0).to(weight.dtype) for each, weight in zip((of_rates, of_biases), gates, strict=True))
