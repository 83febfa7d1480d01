"""Operators of a layer's attention, by the kind of attention. `megatron_rl.cost.operators` has the symbols."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron_rl.cost.operators import Operator, RankShapes, column_input, norm_bytes, row_input
from parallel.attention import AttentionKind, GatedDeltaNet, LatentAttention, SinkAttention, SoftmaxAttention
from parallel.attention.gated_delta_net import SPAN


def list_attention_operators(shapes: RankShapes, kind: AttentionKind) -> Iterator[Operator]:
    """Yield the operators of a layer's norms and attention."""
    model, b, w = shapes.job.model, shapes.job.high_bytes, shapes.operand_bytes
    moved = shapes.rows * model.hidden * (3 * b + w)  # residual stream, sum and operand
    for _ in range(4 if model.post_norms else 2):
        yield Operator(norm_bytes(shapes, shapes.rows, model.hidden), moved, moved)
    yield from _OPERATORS[type(kind)](shapes, kind)


def count_attention_working(shapes: RankShapes, kind: AttentionKind) -> float:
    """Return the most bytes of gradients and temporary tensors of a layer's attention.

    Gradients of output, query, key and value, and FlashAttention-2's FP32 accumulator for the query; on the CPU tier about 10 T q b bytes,
    measured. A gated delta net has the gradients of its inputs, and, in FP32, normalized queries and keys, the gradients of both and of d
    for each value head, and the gradients of states before spans (`kernels.gated_delta.triton_spans`).
    """
    b, tp = shapes.job.high_bytes, shapes.layout.tp
    if isinstance(kind, GatedDeltaNet):
        states = math.ceil(shapes.tokens / SPAN) * kind.v_width * kind.k_dim
        rows = 2 * kind.k_width + 2 * kind.v_heads * kind.k_dim + kind.v_width
        return (shapes.tokens * (2 * b * kind.channels + 4 * rows) + 4 * states) / tp
    q, kv = _head_widths(kind, tp)
    return shapes.tokens * (10 * b * q if shapes.cpu else b * 2 * (q + kv) + 4 * q)


def _head_widths(kind: Any, tp: int) -> tuple[float, float]:
    """Return q and kv."""
    q = kind.heads / tp * kind.head_dim
    return q, max(1.0, kind.kv_heads / tp) * kind.head_dim if isinstance(kind, SoftmaxAttention) else q


def _list_softmax(shapes: RankShapes, kind: SoftmaxAttention) -> Iterator[Operator]:
    model, b, w = shapes.job.model, shapes.job.high_bytes, shapes.operand_bytes
    T, (q, kv) = shapes.tokens, _head_widths(kind, shapes.layout.tp)
    yield Operator(column_input(shapes, model.hidden, "linear_qkv"))
    rotated = T * b * (q + kv if kind.rope else q)  # without positions, k is a view of linear_qkv's result, as v is
    heads, groups = kind.heads / shapes.layout.tp, max(1.0, kind.kv_heads / shapes.layout.tp)
    rotates_whole = kind.rope is not None and kind.rope.share == 1
    fused = not shapes.cpu and rotates_whole and kind.head_dim & (kind.head_dim - 1) == 0  # `kernels.heads.reference`
    if kind.over_all_heads:
        rotated += T * (b * q + 2 * 4)  # k before its norm is a view of the same tensor as v
    elif kind.qk_norm and not fused:
        rotated += norm_bytes(shapes, T * heads, kind.head_dim, own_input=1 < groups < heads)
        rotated += norm_bytes(shapes, T * groups, kind.head_dim, own_input=False)
    yield Operator(rotated, T * 2 * b * (q + kv), T * (2 * b * (q + kv) + b * kv + w * (q + 2 * kv)))
    # v is a view of linear_qkv's result; the backward pass reads the gradient that linear_proj wrote
    attention = T * b * (q + 2 * kv + q) + (0 if shapes.cpu else 4 * T * heads)
    yield Operator(attention + row_input(shapes, q), T * q * (b + w))
    if kind.gated:  # the gate is another part of linear_qkv's result; the product is linear_proj's input
        kept = T * q * ((8 if shapes.cpu else b) + (0 if shapes.quantizes_inputs else b))
        yield Operator(kept, T * q * 2 * b, T * q * 4 * b)


def _list_latent(shapes: RankShapes, kind: LatentAttention) -> Iterator[Operator]:
    """Yield what MLA keeps. Down projections are replicated; the weight of kv_b is dequantized in each pass, and kept."""
    b, heads = shapes.job.high_bytes, kind.heads / shapes.layout.tp
    copies = 2 if shapes.quantizes_inputs and kind.q_rank else 1
    size = copies * shapes.rows * shapes.job.model.hidden * shapes.kept_input_bytes("linear_kv_down_proj")
    size += sum(norm_bytes(shapes, shapes.rows, rank) for rank in (kind.q_rank, kind.kv_rank) if rank)
    size += column_input(shapes, kind.q_rank, "linear_q_up_proj") + shapes.rows * kind.kv_rank * b
    angles = 4 * kind.rope_dim if shapes.cpu else 0
    size += shapes.tokens * b * (heads * 2 * (kind.nope_dim + kind.rope_dim + kind.v_dim) + angles)
    size += row_input(shapes, heads * kind.v_dim)
    size += heads * (kind.nope_dim + kind.v_dim) * kind.kv_rank * b if shapes.job.contract.trainer_format.quantized else 0
    yield Operator(size + (0 if shapes.cpu else 4 * shapes.tokens * heads))


def _list_delta(shapes: RankShapes, kind: GatedDeltaNet) -> Iterator[Operator]:
    """Yield the projections' input; the convolution and the recurrence with its inputs, errors and states; and the gated norm of its
    result. A CPU keeps FP32 inputs and operands of the norm, too."""
    T, b, w, tp = shapes.tokens, shapes.job.high_bytes, shapes.operand_bytes, shapes.layout.tp
    c, v, heads = kind.channels / tp, kind.v_width / tp, kind.v_heads / tp
    yield Operator(column_input(shapes, shapes.job.model.hidden, "in_proj_qkvz"))
    moved, states = T * b * (c + 2 * heads + v), 4 * math.ceil(T / SPAN) * v * kind.k_dim
    if shapes.cpu:
        kept = T * (c * (b + 4) + v * (b + 4) + 4 * (2 * heads * kind.k_dim + 2 * kind.k_heads / tp + 4 * heads)) + states
        norm = 4 * T * (6 * v + heads)
    else:
        kept = T * (b * (2 * c + 2 * heads) + 4 * v) + states
        norm = T * b * (c + 2 * v)  # z is a view of in_proj_qkvz's result
    yield Operator(kept, moved + states, 2 * moved + states)
    yield Operator(norm + T * v * shapes.linear_input_bytes, T * v * (2 * b + w), T * v * (4 * b + w))


_OPERATORS: dict[type[AttentionKind], Callable[[RankShapes, Any], Iterator[Operator]]] = {
    SoftmaxAttention: _list_softmax,
    SinkAttention: _list_softmax,
    LatentAttention: _list_latent,
    GatedDeltaNet: _list_delta,
}
