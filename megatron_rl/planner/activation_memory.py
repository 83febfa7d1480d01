"""Bytes that a forward pass keeps for the backward pass. Counted from the operators of `mcore.layers`, tensor by tensor; what two
operators keep is counted once. Attention is fused, so no scores are kept; dropout is off; nothing is fused with the rotation or SwiGLU.

T tokens of a micro-batch on a rank (S = T / tp of them between the linear layers under sequence parallelism, else S = T), h the hidden
width, q and kv the widths of a rank's query and key heads of d, f its part of the MLP's width, b the bytes of the high dtype:

    two norms       S (h b + 4) each: their inputs, the residual stream, and FP32 statistics
    linear inputs   S h twice, T q, T f: b each, or 1 + 4/128 where a GPU back end quantised it
    attention       T b (q + 2 kv) of linear_qkv, which v is a part of; T b (q + kv) rotated, by 4 T d b cosines and sines;
                    T b q, the result; 4 T heads of statistics
    q and k norm    T b q where q had to be copied out of its groups; statistics
    SwiGLU          T b 4 f: gate and up, silu(gate), and up once more
    experts         as an MLP for S top_k etp rows, as a balanced router gives them, and 4 h each for the weights' gradient
    logits          see `logits`: on the last stage
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.memory import count_layer_kinds
from parallel.layout import Layout

_QUANTISED = 1 + 4 / 128
"""Bytes per element of an operand quantised along the tokens: E4M3 and an FP32 scale for 128 of them."""


@dataclass(frozen=True)
class FormulaInputs:
    """What the formulas above are made of."""

    tokens: float
    rows: float
    """S."""
    high_bytes: int
    linear_input_bytes: float
    """Bytes per element that a linear layer keeps of an input of its own."""
    shares_input: bool
    """A linear layer keeps its input itself, which its maker may keep too."""
    sequence_parallel: bool
    cpu: bool
    """The CPU tier's operators: norms keep FP32 copies, attention no statistics."""


def formula_inputs(job: Workload, layout: Layout, tokens: float, cpu: bool = False) -> FormulaInputs:
    """`tokens`: of a micro-batch on one rank."""
    parallel = job.uses_sequence_parallel(layout.tp)
    quantised = job.contract.train_fp8 and job.config.precision.backend != "emulated"
    linear = _QUANTISED if quantised else job.high_bytes
    return FormulaInputs(tokens, tokens / layout.tp if parallel else tokens, job.high_bytes, linear, not quantised, parallel, cpu)


def count_layer_activations(job: Workload, layout: Layout, w: FormulaInputs, experts: bool) -> float:
    """Of one layer on one rank; `experts`: it has experts instead of one MLP."""
    attention = (_attention if job.model.latent is None else _latent_attention)(job, layout, w)
    mlp = _experts(job, layout, w) if experts else _column_input(w, job.model.hidden) + _swiglu(w, w.tokens, job.model.ffn / layout.tp)
    return 2 * _norm(w, w.rows, job.model.hidden) + attention + mlp


def _norm(w: FormulaInputs, rows: float, width: float, own_input: bool = True) -> float:
    """`own_input`: what is normalised is kept by nobody else."""
    if w.cpu:  # FP32 input, the input itself where it is FP32, and the normalised value
        return rows * (width * (4 + (4 if own_input or w.high_bytes < 4 else 0)) + 4)
    return rows * ((width * w.high_bytes if own_input else 0) + 4)


def _column_input(w: FormulaInputs, width: float) -> float:
    """What a column-parallel layer keeps: under sequence parallelism this rank's part of x itself."""
    return w.rows * width * (w.high_bytes if w.sequence_parallel else w.linear_input_bytes)


def _row_input(w: FormulaInputs, width: float) -> float:
    """What a row-parallel layer keeps beside what its maker keeps."""
    return 0 if w.shares_input else w.tokens * width * w.linear_input_bytes


def _attention(job: Workload, layout: Layout, w: FormulaInputs) -> float:
    model, t, b = job.model, w.tokens, w.high_bytes
    heads, groups = model.heads / layout.tp, max(1.0, model.kv_heads / layout.tp)
    q, kv = heads * model.head_dim, groups * model.head_dim
    found = _column_input(w, model.hidden) + _row_input(w, q)
    found += t * b * ((q + 2 * kv) + (q + kv) + 4 * model.head_dim + q)
    found += 0 if w.cpu else 4 * t * heads
    if model.qk_norm:
        found += _norm(w, t * heads, model.head_dim, own_input=1 < groups < heads) + _norm(w, t * groups, model.head_dim, own_input=False)
    return found


def _latent_attention(job: Workload, layout: Layout, w: FormulaInputs) -> float:
    """MLA's down projections are whole on every rank; the weight of kv_b is made from its blocks in each pass, and kept."""
    assert job.model.latent is not None
    a, heads, b = job.model.latent, job.model.heads / layout.tp, w.high_bytes
    found = w.rows * job.model.hidden * w.linear_input_bytes * (1 if w.shares_input or not a.q_rank else 2)
    found += sum(_norm(w, w.rows, rank) for rank in (a.q_rank, a.kv_rank) if rank)
    found += _column_input(w, a.q_rank) + w.rows * a.kv_rank * b
    found += w.tokens * b * (heads * 2 * (a.nope_dim + a.rope_dim + a.v_dim) + 4 * a.rope_dim) + _row_input(w, heads * a.v_dim)
    found += heads * (a.nope_dim + a.v_dim) * a.kv_rank * b if job.contract.train_fp8 else 0
    return found + (0 if w.cpu else 4 * w.tokens * heads)


def _swiglu(w: FormulaInputs, tokens: float, ffn: float) -> float:
    """With the input of the layer behind it."""
    return tokens * ffn * (4 * w.high_bytes + w.linear_input_bytes)


def _experts(job: Workload, layout: Layout, w: FormulaInputs) -> float:
    experts, hidden = job.model.experts, job.model.hidden
    assert experts is not None
    rows = w.rows * job.top_k * layout.etp
    found = w.rows * (hidden * w.high_bytes + 5 * experts.count + 12 * job.top_k)  # the router's input, weights and choice
    found += rows * (hidden * (w.linear_input_bytes + 4) + 12) + _swiglu(w, rows, experts.ffn / layout.etp)
    return found + (_swiglu(w, w.tokens, experts.shared_ffn / layout.tp) if experts.shared_ffn else 0)


def count_logits(job: Workload, layout: Layout, tokens: float, training: bool) -> float:
    """The most that the last stage needs for a micro-batch's logits [T, V / tp], of b bytes at first: in training they, two FP32 copies
    and the gradient (`mcore.logprobs`), for log-probs and entropy they and four FP32 copies."""
    values = tokens * job.model.vocab / layout.tp
    return values * (2 * job.high_bytes + 8 if training else job.high_bytes + 16)


def count_in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at most, each for all layers of the stage (Narayanan et al., arXiv 2104.04473,
    as Megatron's schedule warms up): pp - stage; with virtual stages (2 (pp - stage - 1) + (vpp - 1) pp + 1) / vpp."""
    if layout.vpp == 1:
        return min(micro_batches, layout.pp - stage)
    return min(micro_batches, (2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp)


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on a rank in one pass over micro-batches."""

    kept: float
    working: float
    """One layer's tensors once more, for what is computed and not kept; and the logits."""


def count_training_activations(job: Workload, candidate: Candidate, stage: int) -> ActivationBytes:
    """Of the training pass on a rank of a pipeline stage."""
    layout, last = candidate.train, stage == candidate.train.pp - 1
    w = formula_inputs(job, layout, job.tokens_per_rank(layout.cp))
    kinds = zip((False, True), count_layer_kinds(job.model, layout.pp, layout.vpp, stage), strict=True)
    counts = {experts: count for experts, count in kinds if count}
    whole = {experts: count_layer_activations(job, layout, w, experts) for experts in counts}
    kept = {experts: min(whole[experts], _kept(job, candidate, w)) for experts in counts}
    in_turn = max(whole[experts] - kept[experts] for experts in counts)  # of the layer that is computed anew
    boundary = 2 * w.rows * job.model.hidden * w.high_bytes if last else 0  # final norm, output layer
    working = max(whole.values()) + in_turn + (count_logits(job, layout, job.tokens_per_rank(layout.cp), True) if last else 0)
    stage_bytes = sum(count * kept[experts] for experts, count in counts.items())
    return ActivationBytes(stage_bytes * count_in_flight(layout, stage, candidate.micro_batches(job)) + boundary, working)


def _kept(job: Workload, candidate: Candidate, w: FormulaInputs) -> float:
    """Bytes of a layer that are not computed anew: at most this many."""
    hidden = w.rows * job.model.hidden * w.high_bytes
    if candidate.recompute == "none":
        return math.inf
    if candidate.recompute == "full":
        return hidden
    attention = (_attention if job.model.latent is None else _latent_attention)(job, candidate.train, w)
    return 2 * _norm(w, w.rows, job.model.hidden) + attention + hidden


def count_logprob_activations(job: Workload, candidate: Candidate, stage: int) -> ActivationBytes:
    """Of a pass without gradient: one layer at a time, then the logits."""
    layout = candidate.train
    w = formula_inputs(job, layout, job.tokens_per_rank(layout.cp))
    kinds = zip((False, True), count_layer_kinds(job.model, layout.pp, layout.vpp, stage), strict=True)
    layer = max(count_layer_activations(job, layout, w, experts) for experts, count in kinds if count)
    return ActivationBytes(0, max(layer, count_logits(job, layout, job.tokens_per_rank(layout.cp), False) if stage == layout.pp - 1 else 0))
