"""Bytes that a forward pass keeps for the backward pass, and what it needs on the way. Counted from the operators of `mcore.layers`,
tensor by tensor; storages that two operators keep are counted once. Attention is fused, so no scores are kept; dropout is off.

T tokens of a micro-batch on a rank (S = T / tp of them between the linear layers under sequence parallelism), h the hidden width,
q and kv the widths of all query and of all key heads, f the MLP's width, b the bytes of the high dtype:

    two norms       S h b and 4 S each                    (their inputs are the residual stream)
    linear inputs   what WGrad takes: S h (or T h) and T q/tp, T f/tp: 1 + 4/128 bytes each where a GPU back end quantised it, else b
    attention       T b (q + 2 kv)/tp, the output of linear_qkv that v is a part of; q and k again after rotation; the result; 4 T heads/tp
    q and k norm    T b q/tp, q in order of its heads; FP32 statistics
    SwiGLU          T b 3 f/tp: gate, up and silu(gate)
    experts         the same for R = S top_k etp rows of a balanced router, and 4 R h for the weights' gradient
    logits          see `logits`: on the last stage

`cpu`: norms keep FP32 copies and attention no statistics, as on the CPU tier, where the test measures real layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.plan.candidate import Candidate, Job
from megatron_rl.plan.memory import layer_kinds
from parallel.layout import Layout

_QUANTISED = 1 + 4 / 128
"""Bytes per element of an operand quantised along the tokens: E4M3 and an FP32 scale for 128 of them."""
_ROUTER_COPIES = 3
"""FP32 values per token and expert that routing keeps: logits, scores, weights."""


@dataclass(frozen=True)
class Widths:
    """What the formulas above are made of."""

    tokens: float
    rows: float
    """S."""
    high: int
    linear: float
    """Bytes per element that a linear layer keeps of an input of its own."""
    shares_input: bool
    """A linear layer keeps its input itself, which its maker may keep too."""
    sequence_parallel: bool
    cpu: bool


def widths(job: Job, layout: Layout, tokens: float, cpu: bool = False) -> Widths:
    """`tokens`: of a micro-batch on one rank."""
    parallel = job.sequence_parallel(layout.tp)
    quantised = job.contract.train_fp8 and job.config.precision.backend != "emulated"
    linear = _QUANTISED if quantised else job.high_bytes
    return Widths(tokens, tokens / layout.tp if parallel else tokens, job.high_bytes, linear, not quantised, parallel, cpu)


def layer_bytes(job: Job, layout: Layout, w: Widths, experts: bool) -> float:
    """Of one layer on one rank; `experts`: it has experts instead of one MLP."""
    mlp = _experts(job, layout, w) if experts else _mlp(job.model.ffn / layout.tp, w)
    attention = _attention(job, layout, w) if job.model.latent is None else _latent_attention(job, layout, w)
    return 2 * _norm(w, w.rows, job.model.hidden) + attention + _column_input(w, job.model.hidden) + mlp


def _norm(w: Widths, rows: float, width: float) -> float:
    if w.cpu:  # x as FP32, which is x itself where high is FP32, and its normalised value
        return rows * width * (w.high if w.high == 4 else w.high + 4) + 4 * rows
    return rows * width * w.high + 4 * rows


def _column_input(w: Widths, width: int) -> float:
    """What a column-parallel layer keeps: under sequence parallelism this rank's part of x itself."""
    return w.rows * width * (w.high if w.sequence_parallel else w.linear)


def _attention(job: Job, layout: Layout, w: Widths) -> float:
    model = job.model
    heads = model.heads / layout.tp
    q, kv = heads * model.head_dim, model.kv_heads * model.head_dim / layout.tp
    found = w.tokens * w.high * (q + 2 * kv)  # linear_qkv's output
    found += w.tokens * w.high * (q + kv)  # rotated
    found += w.tokens * (q * w.high + (0 if w.cpu else 4 * heads))  # the result, and its log-sum-exp
    found += 0 if w.shares_input else w.tokens * q * w.linear  # linear_proj's input
    if model.qk_norm:
        found += w.tokens * q * w.high + 4 * w.tokens * (heads + model.kv_heads / layout.tp)
    return found


def _latent_attention(job: Job, layout: Layout, w: Widths) -> float:
    assert job.model.latent is not None
    a, heads = job.model.latent, job.model.heads / layout.tp
    q, k, v = heads * (a.nope_dim + a.rope_dim), heads * (a.nope_dim + a.rope_dim), heads * a.v_dim
    down = w.rows * w.high * (a.q_rank + a.kv_rank + a.rope_dim)
    normed = w.rows * (a.q_rank + a.kv_rank) * (w.high if w.sequence_parallel else w.linear)
    up = w.tokens * w.high * (2 * q + heads * (a.nope_dim + a.v_dim) + k)  # before and after rotation
    result = w.tokens * (v * w.high + (0 if w.cpu else 4 * heads)) + (0 if w.shares_input else w.tokens * v * w.linear)
    return down + normed + up + result


def _mlp(ffn: float, w: Widths, tokens: float | None = None) -> float:
    tokens = w.tokens if tokens is None else tokens
    return tokens * ffn * (3 * w.high + w.linear)


def _experts(job: Job, layout: Layout, w: Widths) -> float:
    experts = job.model.experts
    assert experts is not None
    rows = w.rows * job.top_k * layout.etp
    found = _ROUTER_COPIES * 4 * w.rows * experts.count
    found += rows * job.model.hidden * (w.linear + 4) + _mlp(experts.ffn / layout.etp, w, rows)
    return found + (_mlp(experts.shared_ffn / layout.tp, w) + _column_input(w, job.model.hidden) if experts.shared_ffn else 0)


def logits(job: Job, layout: Layout, tokens: float, training: bool) -> float:
    """The most that the last stage needs for a micro-batch's logits [T, V / tp], of b bytes at first: in training they, two FP32 copies
    and the gradient (`mcore.logprobs`), for log-probs and entropy they and four FP32 copies."""
    values = tokens * job.model.vocab / layout.tp
    return values * (2 * job.high_bytes + 8 if training else job.high_bytes + 16)


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at most, each for all layers of the stage (Narayanan et al., arXiv 2104.04473,
    as Megatron's schedule warms up): pp - stage; with virtual stages (2 (pp - stage - 1) + (vpp - 1) pp + 1) / vpp."""
    if layout.vpp == 1:
        return min(micro_batches, layout.pp - stage)
    return min(micro_batches, (2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp)


@dataclass(frozen=True)
class Activations:
    """Bytes on a rank in one pass over micro-batches."""

    kept: float
    working: float
    """One layer's tensors once more, for what is computed and not kept; and the logits."""


def training(job: Job, candidate: Candidate, stage: int) -> Activations:
    """Of the training pass on a rank of a pipeline stage."""
    layout = candidate.train
    w = widths(job, layout, job.places(layout.cp))
    plain, sparse = layer_kinds(job.model, layout.pp, layout.vpp, stage)
    each = {kind: layer_bytes(job, layout, w, kind) for kind, count in ((False, plain), (True, sparse)) if count}
    whole = sum(each[kind] * count for kind, count in ((False, plain), (True, sparse)) if count)
    boundary = w.rows * job.model.hidden * w.high
    kept = (plain + sparse) * boundary if job.recompute else whole
    last = stage == layout.pp - 1
    working = max(each.values()) * (2 if job.recompute else 1) + (logits(job, layout, job.places(layout.cp), True) if last else 0)
    return Activations(kept * in_flight(layout, stage, candidate.micro_batches(job)) + (2 * boundary if last else 0), working)


def scoring(job: Job, candidate: Candidate, stage: int) -> Activations:
    """Of a pass without gradient: one layer at a time, then the logits."""
    layout = candidate.train
    w = widths(job, layout, job.places(layout.cp))
    plain, sparse = layer_kinds(job.model, layout.pp, layout.vpp, stage)
    layer = max(layer_bytes(job, layout, w, kind) for kind, count in ((False, plain), (True, sparse)) if count)
    return Activations(0, max(layer, logits(job, layout, job.places(layout.cp), False) if stage == layout.pp - 1 else 0))
