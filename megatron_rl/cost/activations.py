"""Totals over a rank's operators: activations of training and scoring passes, and the least bytes that a pass or an update moves."""

import math
from dataclasses import dataclass
from functools import lru_cache

from megatron_rl.batch.packing import LOGITS_PER_CHUNK, LOGITS_PER_GPU_CHUNK, VALUE_ROWS
from megatron_rl.cost.attention import count_attention_working, list_attention_operators
from megatron_rl.cost.operators import RankShapes, list_mlp_operators, norm_bytes, quantized_bytes
from megatron_rl.cost.weights import EXPERT, count_layer_kinds, count_rank_shards
from megatron_rl.cost.workload import Candidate, Workload
from parallel.attention import LatentAttention
from parallel.layout import Layout
from parallel.layout_hints import keep_rank_sizes
from parallel.model_geometry import LayerKind
from parallel.row_sums import count_parts


@dataclass(frozen=True)
class ActivationBytes:
    """Activation memory of a rank in a training pass."""

    kept: float
    working: float
    """The largest temporary tensors of one operator and, with recomputation, of one layer."""


def count_training_activations(job: Workload, candidate: Candidate, stage: int) -> ActivationBytes:
    layout, is_last = candidate.train, stage == candidate.train.pp - 1
    shapes = _make_shapes(job, layout)
    layers = [
        (count, whole, min(whole, _kept_limit(candidate, shapes, of_attention)))
        for count, whole, of_attention in _stage_layers(shapes, layout, stage)
    ]
    boundary = 2 * shapes.hidden_input if is_last else 0  # final norm, output layer
    mtp_layers = job.trained_mtp_layers if is_last else 0
    recomputed = max(whole - kept for _, whole, kept in layers)  # one layer at a time
    at_once = candidate.at_once(job, trains=True)
    logits = count_logits(shapes, True, at_once * (1 + mtp_layers) if candidate.recompute == "none" else 0) if is_last else 0
    working = max(logits, recomputed + count_working(shapes))  # the logits are freed before a layer is recomputed
    stage_bytes = sum(count * kept for count, _, kept in layers) + mtp_layers * _mtp_layer_bytes(shapes, candidate, layers[-1][2])
    in_flight = count_in_flight(layout, stage, -(-candidate.micro_batches(job) // at_once))
    return ActivationBytes(at_once * (stage_bytes * in_flight + boundary), working)


def count_layer_activations(shapes: RankShapes, kind: LayerKind) -> float:
    """Return the bytes that one layer keeps for the backward pass."""
    return _attention_bytes(shapes, kind) + sum(operator.kept for operator in list_mlp_operators(shapes, kind.has_experts))


def _attention_bytes(shapes: RankShapes, kind: LayerKind) -> float:
    return sum(operator.kept for operator in list_attention_operators(shapes, kind.attention))


def _make_shapes(job: Workload, layout: Layout) -> RankShapes:
    """Return the shapes on a rank of a layout, the same for all numbers of stages and replicas, so that results can be cached."""
    return RankShapes(job, keep_rank_sizes(layout), job.tokens_per_rank(layout.cp))


def _stage_layers(shapes: RankShapes, layout: Layout, stage: int) -> list[tuple[int, float, float]]:
    """Return (number of layers, bytes of one layer, of which attention's) for each kind of layer of a stage."""
    counts = count_layer_kinds(shapes.job.model, layout, stage)
    return [(count, *sizes) for count, sizes in zip(counts, _list_layer_sizes(shapes), strict=True) if count]


@lru_cache(maxsize=4096)
def _list_layer_sizes(shapes: RankShapes) -> list[tuple[float, float]]:
    """Return the bytes of a layer, and those of its attention, for each kind of layer."""
    return [(count_layer_activations(shapes, kind), _attention_bytes(shapes, kind)) for kind in shapes.job.model.layer_kinds]


def _kept_limit(candidate: Candidate, shapes: RankShapes, attention: float) -> float:
    """Return the most bytes of a layer, with these of attention, that are kept. The rest is recomputed."""
    if candidate.recompute == "none":
        return math.inf
    return shapes.hidden_input + (0 if candidate.recompute == "full" else attention)


def _mtp_layer_bytes(shapes: RankShapes, candidate: Candidate, decoder_layer: float) -> float:
    """Return the bytes that a multi-token prediction layer keeps beyond its share of the logits.

    It keeps the scored states twice and the states of all tokens, and the hidden state and the embedding; without full recomputation
    also their norms, the decoder layer, and the gathered result of the projection.
    """
    width = shapes.job.model.hidden
    size = 5 * shapes.hidden_input + shapes.tokens * width * shapes.job.high_bytes
    if candidate.recompute == "full":
        return size
    gathered = (shapes.tokens - shapes.rows) * width * shapes.job.high_bytes
    return size + decoder_layer + 2 * norm_bytes(shapes, shapes.rows, width) + gathered


def count_logits(shapes: RankShapes, training: bool, kept: int = 0) -> float:
    """Return the peak bytes that `mcore.passes.logprobs` allocates for a chunk of logits on the last stage.

    On a GPU without top_k that is the chunk itself. Otherwise two FP32 copies are added; on a CPU, training also makes a BF16 gradient of
    the output weight [vocab / tp, hidden].

    Args:
        kept: how many copies of a micro-batch's logits stay allocated on a GPU without top_k.
    """
    job, vocabulary = shapes.job, shapes.job.model.vocab / shapes.layout.tp
    if job.model.value_head:
        return 8 * min(shapes.tokens, VALUE_ROWS) * job.model.hidden
    if not shapes.cpu and job.config.rollout.top_k == -1:
        values = shapes.tokens * vocabulary
        return (kept * values or min(values, LOGITS_PER_GPU_CHUNK)) * job.high_bytes
    values = min(shapes.tokens * vocabulary, LOGITS_PER_CHUNK)
    weight_gradient = vocabulary * job.model.hidden * job.high_bytes if training and shapes.cpu and job.high_bytes < 4 else 0
    return values * job.high_bytes + max(values * 8, weight_gradient)


def count_in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Return the largest number of micro-batches whose activations a stage holds, in units of all layers of the stage.

    pp - stage, or with virtual stages (2 (pp - stage - 1) + (vpp - 1) pp + 1) / vpp, as Megatron's schedule warms up (Narayanan et al.,
    arXiv 2104.04473).
    """
    if layout.vpp == 1:
        return min(micro_batches, layout.pp - stage)
    return min(micro_batches, (2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp)


@lru_cache(maxsize=4096)
def count_working(shapes: RankShapes) -> float:
    """Return the most bytes of gradients and temporary tensors of one operator of a layer.

    SwiGLU: four gradients as wide as the MLP (three on a GPU), and a GPU backend's two quantized copies of one gradient. Attention
    (`count_attention_working`), which runs after the MLP's tensors are freed.
    """
    model, layout, b = shapes.job.model, shapes.layout, shapes.job.high_bytes
    attention = max(count_attention_working(shapes, kind.attention) for kind in model.layer_kinds)
    values = shapes.tokens * model.ffn / layout.tp
    if model.experts is not None:
        values = max(shapes.expert_rows * model.experts.ffn / layout.etp, shapes.tokens * model.experts.shared_ffn / layout.tp)
    swiglu = (4 if shapes.cpu else 3) * b
    return max((swiglu + (2 if shapes.quantizes_gradients else 0)) * values, attention - swiglu * values, _tree_sum_bytes(shapes))


def _tree_sum_bytes(shapes: RankShapes) -> float:
    """Return the bytes of FP32 partial sums, received partial sums and results of a row-parallel sum by tree, or of the parts that a rank
    holds and receives and their sums with `precision.reduction = "ranks"`; 0 for other reductions."""
    model, layout, b = shapes.job.model, shapes.layout, shapes.job.high_bytes
    if shapes.job.contract.sums_by_ranks:
        slices = count_parts(layout.tp, shapes.job.config.rollout.tp) // layout.tp
        copies = 1 if layout.tp == 1 else 2 if slices == 1 else 3  # computed, laid out for the exchange, received
        return (shapes.tokens * copies * slices + shapes.rows) * model.hidden * b if slices * layout.tp > 1 else 0
    if not shapes.job.contract.sums_by_tree:
        return 0
    sums = shapes.tokens * model.hidden * (4 + (4 if layout.tp > 1 else b))
    if model.experts is None:
        return sums
    outputs = shapes.rows * shapes.job.top_k * model.hidden
    partial = outputs * layout.etp * (12 + b) if layout.etp > 1 else 0  # twice, because rows are padded to a multiple of the ranks
    return max(sums, partial, outputs * (2 * b + 8) + shapes.hidden_input)  # or the sum over a token's experts


def count_logprob_activations(job: Workload, candidate: Candidate, stage: int) -> float:
    """Return the activation memory of a pass without gradients: the larger of one layer and the logits."""
    layout = candidate.train
    shapes = _make_shapes(job, layout)
    layer = max(size for _, size, _ in _stage_layers(shapes, layout, stage))
    sums = _tree_sum_bytes(shapes)
    if job.contract.sums_by_ranks:  # a sum is no peak by itself: a layer keeps two results that are freed by then
        layer += max(sums - 2 * shapes.tokens * job.model.hidden * job.high_bytes, 0)
    else:
        layer += sums or _adapter_output_bytes(shapes)
    return max(layer, count_logits(shapes, False) if stage == layout.pp - 1 else 0)


def _adapter_output_bytes(shapes: RankShapes) -> float:
    """Return the bytes of the output of a dense MLP's gate and up adapter, before and after scaling."""
    model = shapes.job.model
    if model.adapters is None or "linear_fc1" not in model.adapters.targets or model.experts is not None:
        return 0
    return 2 * shapes.tokens * 2 * model.ffn / shapes.layout.tp * shapes.job.high_bytes


def count_least_bytes_in_pass(job: Workload, candidate: Candidate, stage: int, trains: bool) -> float | None:
    """Return the least bytes that element-wise kernels of a micro-batch's forward pass (with `trains`, forward and backward) can move.

    None for latent attention and trained multi-token prediction layers, whose formulas do not exist yet. A fully recomputed layer runs its
    forward pass twice.
    """
    model, layout = job.model, candidate.train
    if any(isinstance(kind.attention, LatentAttention) for kind in model.layer_kinds) or (model.trains_mtp and trains):
        return None
    shapes = RankShapes(job, layout, job.tokens_per_rank(layout.cp), trains=trains)
    S, T, h, b, least = shapes.rows, shapes.tokens, model.hidden, job.high_bytes, 0.0
    forwards = 2 if trains and candidate.recompute == "full" else 1
    for (attention, has_experts), count in zip(model.layer_kinds, count_layer_kinds(model, layout, stage), strict=True):
        operators = [*list_attention_operators(shapes, attention), *list_mlp_operators(shapes, has_experts)]
        least += count * sum(forwards * operator.forward + trains * operator.backward for operator in operators)
    if stage == 0:  # the embedding's gradient is added to FP32 rows
        least += S * h * (2 * b + (b + 8 if trains else 0))
    if stage == layout.pp - 1:  # logits are read and, in training, changed in place
        least += (3 if trains else 1) * T * b * model.vocab / layout.tp
    return least


def count_least_bytes_per_update(job: Workload, candidate: Candidate, stage: int) -> float:
    """Return the least bytes that an optimizer step moves: gradients zeroed and measured; gradients, masters and moments of the rank's
    share; and the new blocks, quantized by rows and by columns."""
    least = 0.0
    for shard, count in count_rank_shards(job.model, candidate.train, stage):
        replicas = candidate.train.edp if EXPERT in shard.name else candidate.train.dp * candidate.train.cp
        quantized = job.contract.trainer_format_of(shard.role).quantized
        blocks = 2 * quantized_bytes(job) if quantized else job.high_bytes
        least += count * shard.rows * shard.cols * (8 + 28 / replicas + blocks)
    return least
