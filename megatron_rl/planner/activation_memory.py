"""Bytes that a forward pass keeps for the backward pass, counted from the operators of `mcore.layers` tensor by tensor. A tensor that two
operators keep counts once. Attention is fused, so no scores are kept; dropout is off.

T tokens of a micro-batch on a rank (S = T / tp of them between the linear layers under sequence parallelism, else S = T), h the hidden
width, q and kv the widths of a rank's query and key heads of d, of which d' is rotated, f its part of the MLP's width,
b the bytes of the high dtype:

    norms           S (h b + 4) each of two, or of four: their inputs, such as the residual stream, and FP32 statistics
    linear inputs   S h twice, T q, T f: b each, or 1 + 4/128 where a GPU back end quantized it
    attention       T b (q + 2 kv) of linear_qkv, which v is a view of; T b (q + kv) rotated, on a CPU with 4 T d' b cosines and sines;
                    T b q, the result; 4 T heads of statistics
    q and k norm    on a CPU, and where heads are rotated in part: T b q where q had to be copied out of its groups; statistics
    SwiGLU          T b 4 f: gate and up, silu(gate), and up once more; on a GPU T b 2 f
    experts         as an MLP for S top_k etp rows (a balanced router), and their outputs for the weights' gradient; where they run at
                    once, each expert's rows are padded to a multiple of 128
    adapters        T r b of each layer that has one of rank r; its input is kept in the high dtype; a frozen layer keeps none
    logits          see `count_logits`: on the last stage

Beside what is kept, a training pass works with one operator's tensors at a time, most of them gradients: see `count_working`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.batch.packing import LOGITS_PER_CHUNK, LOGITS_PER_GPU_CHUNK, VALUE_ROWS
from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.memory import count_layer_kinds
from parallel.formats import BLOCK
from parallel.layout import Layout


@dataclass(frozen=True)
class FormulaInputs:
    """The quantities of the formulas above, for one rank of a layout."""

    job: Workload
    layout: Layout
    tokens: float
    """T: tokens of a micro-batch on this rank."""
    cpu: bool = False
    """The CPU tier's operators: norms keep FP32 copies, attention no statistics."""

    @cached_property
    def sequence_parallel(self) -> bool:
        """Tensor parallel ranks share the tokens in norms and residuals; Megatron's experts require it."""
        return self.layout.tp > 1 and (self.job.model.experts is not None or self.job.config.train.layout.sequence_parallel)

    @cached_property
    def rows(self) -> float:
        """S."""
        return self.tokens / self.layout.tp if self.sequence_parallel else self.tokens

    @cached_property
    def routed_rows(self) -> float:
        """Rows that this rank's experts get from a balanced router."""
        return self.rows * self.job.top_k * self.layout.etp

    @cached_property
    def expert_rows(self) -> float:
        """Rows that they compute: where they run at once, each expert's are padded (`token_groups`)."""
        if self.job.model.experts is None or not self.quantizes_gradients or self.job.contract.sums_by_tree:
            return self.routed_rows
        local = self.job.model.experts.count / self.layout.ep
        return local * math.ceil(self.routed_rows / local / BLOCK) * BLOCK

    @cached_property
    def quantizes_inputs(self) -> bool:
        """A linear layer keeps a quantized copy of its input; else it keeps the input itself, which its producer may keep too."""
        return self.quantizes_gradients and not self.job.trains_adapters

    @cached_property
    def quantizes_gradients(self) -> bool:
        return self.job.contract.trainer_format.quantized and self.job.config.precision.backend != "emulated"

    @cached_property
    def linear_input_bytes(self) -> float:
        """Bytes per element that a linear layer keeps of an input of its own."""
        return self.job.contract.trainer_format.group_bytes if self.quantizes_inputs else self.job.high_bytes

    def kept_input_bytes(self, layer: str) -> float:
        """The same of Megatron's layer of this name: 0 where it is frozen and has no adapter."""
        adapters = self.job.model.adapters
        return 0.0 if adapters is not None and layer not in adapters.targets else self.linear_input_bytes

    @cached_property
    def hidden_input(self) -> float:
        """Bytes of the residual stream."""
        return self.rows * self.job.model.hidden * self.job.high_bytes


def count_layer_activations(inputs: FormulaInputs, has_experts: bool) -> float:
    """Return the bytes of one layer on one rank; `has_experts`: it has experts instead of one MLP."""
    model = inputs.job.model
    adapters = _adapters(inputs, has_experts)
    if has_experts:
        return _norms_and_attention(inputs) + _experts(inputs) + adapters
    mlp = _column_input(inputs, model.hidden, "linear_fc1") + _swiglu(inputs, inputs.tokens, model.ffn / inputs.layout.tp)
    return _norms_and_attention(inputs) + mlp + adapters


def _adapters(inputs: FormulaInputs, has_experts: bool) -> float:
    """What is narrow in the adapters of a layer."""
    adapters, job = inputs.job.model.adapters, inputs.job
    if adapters is None:
        return 0
    experts = inputs.rows * job.top_k * inputs.layout.etp if has_experts else 0
    shared = inputs.tokens if job.model.experts is None or not has_experts or job.model.experts.shared_ffn else 0
    tokens = sum(inputs.tokens if target in ("linear_qkv", "linear_proj") else experts + shared for target in adapters.targets)
    return tokens * adapters.rank * job.high_bytes


def _norms_and_attention(inputs: FormulaInputs) -> float:
    attention = _attention(inputs) if inputs.job.model.latent is None else _latent_attention(inputs)
    norms = 4 if inputs.job.model.post_norms else 2
    return norms * _norm(inputs, inputs.rows, inputs.job.model.hidden) + attention


def _norm(inputs: FormulaInputs, rows: float, width: float, own_input: bool = True) -> float:
    """`own_input`: no other operator keeps what is normalized."""
    if inputs.cpu:  # FP32 input, the input itself where it is FP32, and the normalized value
        return rows * (width * (4 + (4 if own_input or inputs.job.high_bytes < 4 else 0)) + 4)
    return rows * ((width * inputs.job.high_bytes if own_input else 0) + 4)


def _column_input(inputs: FormulaInputs, width: float, layer: str) -> float:
    """What a column-parallel layer keeps: under sequence parallelism this rank's part of x itself."""
    return inputs.rows * width * (inputs.job.high_bytes if inputs.sequence_parallel else inputs.kept_input_bytes(layer))


def _row_input(inputs: FormulaInputs, width: float) -> float:
    """What a row-parallel layer keeps beside what the producer of its input keeps."""
    return inputs.tokens * width * inputs.linear_input_bytes if inputs.quantizes_inputs else 0


def _attention(inputs: FormulaInputs) -> float:
    model, tokens = inputs.job.model, inputs.tokens
    heads, groups = model.heads / inputs.layout.tp, max(1.0, model.kv_heads / inputs.layout.tp)
    q, kv = heads * model.head_dim, groups * model.head_dim
    size = _column_input(inputs, model.hidden, "linear_qkv") + _row_input(inputs, q)
    angles = 4 * model.head_dim * model.rope.share if inputs.cpu else 0
    size += tokens * inputs.job.high_bytes * ((q + 2 * kv) + (q + kv) + angles + q)
    size += 0 if inputs.cpu else 4 * tokens * heads
    at_once = not inputs.cpu and model.rope.share == 1 and model.head_dim & (model.head_dim - 1) == 0  # `kernels.heads.reference`
    if model.qk_norm and not at_once:
        size += _norm(inputs, tokens * heads, model.head_dim, own_input=1 < groups < heads)
        size += _norm(inputs, tokens * groups, model.head_dim, own_input=False)
    return size


def _latent_attention(inputs: FormulaInputs) -> float:
    """MLA's down projections are whole on every rank; the weight of kv_b is made from its blocks in each pass, and kept."""
    model, latent, high_bytes = inputs.job.model, inputs.job.model.latent, inputs.job.high_bytes
    assert latent is not None
    heads = model.heads / inputs.layout.tp
    copies = 2 if inputs.quantizes_inputs and latent.q_rank else 1
    size = copies * inputs.rows * model.hidden * inputs.kept_input_bytes("linear_kv_down_proj")
    size += sum(_norm(inputs, inputs.rows, rank) for rank in (latent.q_rank, latent.kv_rank) if rank)
    size += _column_input(inputs, latent.q_rank, "linear_q_up_proj") + inputs.rows * latent.kv_rank * high_bytes
    size += (
        inputs.tokens
        * high_bytes
        * (heads * 2 * (latent.nope_dim + latent.rope_dim + latent.v_dim) + (4 * latent.rope_dim if inputs.cpu else 0))
    )
    size += _row_input(inputs, heads * latent.v_dim)
    size += heads * (latent.nope_dim + latent.v_dim) * latent.kv_rank * high_bytes if inputs.job.contract.trainer_format.quantized else 0
    return size + (0 if inputs.cpu else 4 * inputs.tokens * heads)


def _swiglu(inputs: FormulaInputs, tokens: float, ffn: float) -> float:
    """SwiGLU and the input of the layer behind it."""
    return tokens * ffn * ((4 if inputs.cpu else 2) * inputs.job.high_bytes + inputs.kept_input_bytes("linear_fc2"))


def _experts(inputs: FormulaInputs) -> float:
    model, layout, top_k, rows = inputs.job.model, inputs.layout, inputs.job.top_k, inputs.expert_rows
    experts = model.experts
    assert experts is not None
    size = inputs.rows * (model.hidden * inputs.job.high_bytes + 5 * experts.count + 12 * top_k)  # the router's input, weights and choice
    size += rows * (model.hidden * (inputs.kept_input_bytes("linear_fc1") + inputs.job.high_bytes) + 12)
    size += _swiglu(inputs, rows, experts.ffn / layout.etp)
    return size + (_swiglu(inputs, inputs.tokens, experts.shared_ffn / layout.tp) if experts.shared_ffn else 0)


def count_logits(inputs: FormulaInputs, training: bool, kept: int = 0) -> float:
    """Return the peak bytes of what `mcore.passes.logprobs` makes of a chunk of logits on the last stage, b bytes a value: on a GPU they alone,
    without top_k; on a CPU two FP32 copies, and in training at another time a BF16 weight's gradient [V / tp, h] before it is added.
    `kept`: how often a micro-batch's logits are kept whole, which a GPU does where there is no top_k."""
    job, vocabulary = inputs.job, inputs.job.model.vocab / inputs.layout.tp
    if job.model.value_head:
        return 8 * min(inputs.tokens, VALUE_ROWS) * job.model.hidden
    if not inputs.cpu and job.config.rollout.top_k == -1:
        values = inputs.tokens * vocabulary
        return (kept * values or min(values, LOGITS_PER_GPU_CHUNK)) * job.high_bytes
    values = min(inputs.tokens * vocabulary, LOGITS_PER_CHUNK)
    weight_gradient = vocabulary * job.model.hidden * job.high_bytes if training and inputs.cpu and job.high_bytes < 4 else 0
    return values * job.high_bytes + max(values * 8, weight_gradient)


def count_in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Return how many micro-batches' activations a stage holds at most, each for all layers of the stage (Narayanan et al., arXiv
    2104.04473, as Megatron's schedule warms up): pp - stage; with virtual stages (2 (pp - stage - 1) + (vpp - 1) pp + 1) / vpp."""
    if layout.vpp == 1:
        return min(micro_batches, layout.pp - stage)
    return min(micro_batches, (2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp)


def count_working(inputs: FormulaInputs) -> float:
    """Return the most bytes of gradients and intermediate results within one operator of a layer's backward pass.

    SwiGLU: four gradients as wide as the MLP, three on a GPU, and a GPU back end's quantized copies of one. Sums by the tree, in the
    forward pass: see `_count_tree_sums`. Attention, which comes when the MLP's own tensors are freed: the gradients of its result, query,
    key and value, and FlashAttention-2's FP32 sum for the query; on the CPU tier about 10 T b q, measured.
    """
    model, layout, high_bytes = inputs.job.model, inputs.layout, inputs.job.high_bytes
    if model.latent is None:
        q, kv = model.heads / layout.tp * model.head_dim, max(1.0, model.kv_heads / layout.tp) * model.head_dim
    else:
        q = kv = model.heads / layout.tp * (model.latent.nope_dim + model.latent.rope_dim)
    attention = inputs.tokens * (10 * high_bytes * q if inputs.cpu else high_bytes * 2 * (q + kv) + 4 * q)
    values = inputs.tokens * model.ffn / layout.tp
    if model.experts is not None:
        values = max(inputs.expert_rows * model.experts.ffn / layout.etp, inputs.tokens * model.experts.shared_ffn / layout.tp)
    copies = 2 if inputs.quantizes_gradients else 0
    swiglu = (4 if inputs.cpu else 3) * high_bytes
    return max((swiglu + copies) * values, attention - swiglu * values, _count_tree_sums(inputs))


def _count_tree_sums(inputs: FormulaInputs) -> float:
    """Return the bytes of a sum by the tree, 0 without: FP32 partial sums, and those of other ranks or the rounded sum.

    With experts the partial sums of a token's choices, twice, as rows are filled up to a multiple of the ranks; or, in the sum over them,
    the tokens and outputs by expert, these in FP32, as much again for an addition that joins them in pairs, and the result.
    """
    model, layout, high_bytes = inputs.job.model, inputs.layout, inputs.job.high_bytes
    if not inputs.job.contract.sums_by_tree:
        return 0
    sums = inputs.tokens * model.hidden * (4 + (4 if layout.tp > 1 else high_bytes))
    if model.experts is None:
        return sums
    outputs = inputs.rows * inputs.job.top_k * model.hidden
    partial = outputs * layout.etp * (12 + high_bytes) if layout.etp > 1 else 0
    return max(sums, partial, outputs * (2 * high_bytes + 8) + inputs.hidden_input)


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on a rank in a training pass over micro-batches."""

    kept: float
    working: float
    """Where a layer is recomputed, its tensors; and those of the operator that works with the most."""


def count_training_activations(job: Workload, candidate: Candidate, stage: int) -> ActivationBytes:
    """Return the bytes of the training pass on a rank of a pipeline stage."""
    layout, is_last = candidate.train, stage == candidate.train.pp - 1
    inputs = FormulaInputs(job, layout, job.tokens_per_rank(layout.cp))
    kept_limit = _kept_limit(candidate, inputs)
    layers = [(count, whole, min(whole, kept_limit)) for count, whole in _stage_layers(inputs, stage)]
    boundary = 2 * inputs.hidden_input if is_last else 0  # final norm, output layer
    ahead = job.trained_mtp_layers if is_last else 0
    recomputed = max(whole - kept for _, whole, kept in layers)  # one layer at a time
    at_once = candidate.at_once(job, trains=True)
    logits = count_logits(inputs, True, at_once * (1 + ahead) if candidate.recompute == "none" else 0) if is_last else 0
    working = max(logits, recomputed + count_working(inputs))  # the logits' pass ends before a layer is recomputed
    stage_bytes = sum(count * kept for count, _, kept in layers) + ahead * _count_ahead(inputs, candidate, layers[-1][2])
    in_flight = count_in_flight(layout, stage, -(-candidate.micro_batches(job) // at_once))
    return ActivationBytes(at_once * (stage_bytes * in_flight + boundary), working)


def _count_ahead(inputs: FormulaInputs, candidate: Candidate, kept: float) -> float:
    """Return the bytes that a layer for multi-token prediction keeps, `kept` of them as the decoder's last: the state and the embedding, or
    where it is not recomputed their norms, both side by side, and the projection's result, whole on every rank; and in the scores of its
    states two copies, and the states of all tokens."""
    width = inputs.job.model.hidden
    scores = 3 * inputs.hidden_input + inputs.tokens * width * inputs.job.high_bytes
    if candidate.recompute == "full":
        return scores + 2 * inputs.hidden_input
    gathered = (inputs.tokens - inputs.rows) * width * inputs.job.high_bytes
    return scores + kept + 2 * _norm(inputs, inputs.rows, width) + 2 * inputs.hidden_input + gathered


def _stage_layers(inputs: FormulaInputs, stage: int) -> list[tuple[int, float]]:
    """Return (how many, bytes of one) for each kind of layer that a stage has."""
    counts = count_layer_kinds(inputs.job.model, inputs.layout, stage)
    return [
        (count, count_layer_activations(inputs, has_experts)) for has_experts, count in zip((False, True), counts, strict=True) if count
    ]


def _kept_limit(candidate: Candidate, inputs: FormulaInputs) -> float:
    """Return the most bytes of a layer that are kept; the rest is recomputed."""
    if candidate.recompute == "none":
        return math.inf
    if candidate.recompute == "full":
        return inputs.hidden_input
    return _norms_and_attention(inputs) + inputs.hidden_input


def count_logprob_activations(job: Workload, candidate: Candidate, stage: int) -> float:
    """Return the bytes of a pass without gradient, which keeps nothing: one layer at a time, and its sum by the tree or what an adapter
    adds; then the logits."""
    layout = candidate.train
    inputs = FormulaInputs(job, layout, job.tokens_per_rank(layout.cp))
    layer = max(size for _, size in _stage_layers(inputs, stage)) + (_count_tree_sums(inputs) or _count_adapter_sum(inputs))
    return max(layer, count_logits(inputs, False) if stage == layout.pp - 1 else 0)


def _count_adapter_sum(inputs: FormulaInputs) -> float:
    """Return the bytes of what an adapter of a dense MLP adds to gate and up, before and after it is scaled."""
    model = inputs.job.model
    if model.adapters is None or "linear_fc1" not in model.adapters.targets or model.experts is not None:
        return 0
    return 2 * inputs.tokens * 2 * model.ffn / inputs.layout.tp * inputs.job.high_bytes
