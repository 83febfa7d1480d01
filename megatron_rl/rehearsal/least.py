"""The least bytes that element-wise kernels can move, as if all between two products (attention is one) were one kernel.

Such a kernel reads what the product before wrote, and writes what the product behind reads: b bytes a number of the high dtype,
g = 1 + 4/128 of a quantized operand, rows for this product and, in training, columns for WGrad; w = g or 2 g, and b where nothing is
quantized. S rows of the residual stream on a rank, T tokens between the linear layers of a block, h, q, kv, f: widths on a rank
(`planner.activation_memory`).

    forward, a layer                                           backward
    norm        2 S h (3 b + w)    stream, sum, operand        2 S h (3 b + w)     gradient, stream, its gradient; proj's or fc2's operand
    q, k        T 2 b (q + kv)     norm and rope               T (2 b (q + kv) + b kv + w (q + 2 kv))
    attention   T q (b + w)        proj's operand              none: its kernel takes what proj's product wrote
    SwiGLU      T f (2 b + w)      fc2's operand               T f (3 b + 2 w)
    experts     R = S top_k etp rows: SwiGLU as above; v a number as it travels to other ranks: g, in training b, of which columns are made
      there     S h v + R h v          read once           R h 2 b                 out of the experts' rows
      sorted    R h (v + w)                                R h b + S h b           summed
      weighed   R h 2 b                                    R h (2 b + w)           gradient, and the outputs, for that of their weights
      back      R h b + S h b          summed              S h b + R h b           read once
    logits      T b V / tp         read once                   T 2 b V / tp        read, and changed in place
    embedding   S h 2 b                                        S h (b + 8)         added to FP32 rows

and once a step, P weights of a rank, P' on which it steps:

    optimizer   P 8 + P' 28 + P w        gradients zeroed and measured; gradient, master, two moments; blocks, both ways round

A recomputed layer has its forward pass twice. Not in it: routers, bias, statistics; latent attention and layers for multi-token
prediction, of which no figure is given.
"""

from __future__ import annotations

from megatron_rl.planner.activation_memory import FormulaInputs
from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.memory import EXPERT, count_layer_kinds, count_rank_shards


def count_least_in_pass(job: Workload, candidate: Candidate, stage: int, trains: bool) -> float | None:
    """Return the bytes of a micro-batch's forward pass on a rank of a stage, or of forward and backward; None for latent attention
    and for layers for multi-token prediction."""
    model, layout = job.model, candidate.train
    if model.latent is not None or (model.trains_mtp and trains):
        return None
    inputs = FormulaInputs(job, layout, job.tokens_per_rank(layout.cp))
    b, operand = job.high_bytes, _operand_bytes(job)
    w = (2 if trains and inputs.quantizes_inputs else 1) * operand
    S, T, h = inputs.rows, inputs.tokens, model.hidden
    plain, sparse = count_layer_kinds(model, layout, stage)
    forward, backward = _count_attention(inputs, w)
    shared = model.experts.shared_ffn / layout.tp if model.experts else 0
    rows_of_widths = [(plain, T, model.ffn / layout.tp)]
    if model.experts is not None:
        R = S * job.top_k * layout.etp
        rows_of_widths += [(sparse, R, model.experts.ffn / layout.etp), (sparse, T, shared)]
        v = b if trains else operand
        forward += sparse / (plain + sparse) * (R * h * (2 * v + w + 3 * b) + S * h * (v + b))
        backward += sparse / (plain + sparse) * (R * h * (6 * b + w) + S * h * 2 * b)
    least = (plain + sparse) * forward + sum(count * rows * f * (2 * b + w) for count, rows, f in rows_of_widths)
    if trains:
        least *= 2 if candidate.recompute == "full" else 1
        least += (plain + sparse) * backward + sum(count * rows * f * (3 * b + 2 * w) for count, rows, f in rows_of_widths)
    if stage == 0:
        least += S * h * (2 * b + (b + 8 if trains else 0))
    if stage == layout.pp - 1:
        least += (3 if trains else 1) * T * b * model.vocab / layout.tp
    return least


def _count_attention(inputs: FormulaInputs, w: float) -> tuple[float, float]:
    """Return (forward, backward) bytes of a layer's two norms and its attention."""
    model, b, T = inputs.job.model, inputs.job.high_bytes, inputs.tokens
    q, kv = (max(1.0, heads / inputs.layout.tp) * model.head_dim for heads in (model.heads, model.kv_heads))
    norms = (4 if model.post_norms else 2) * inputs.rows * model.hidden * (3 * b + w)
    return (
        norms + T * (2 * b * (q + kv) + q * (b + w)),
        norms + T * (2 * b * (q + kv) + b * kv + w * (q + 2 * kv)),
    )


def count_least_per_update(job: Workload, candidate: Candidate, stage: int) -> float:
    """Return the bytes of an optimizer step on a rank of a stage."""
    least = 0.0
    for shard, count in count_rank_shards(job.model, candidate.train, stage):
        replicas = candidate.train.edp if EXPERT in shard.name else candidate.train.dp * candidate.train.cp
        quantized = job.contract.trainer_format_of(shard.role).quantized
        blocks = 2 * _operand_bytes(job) if quantized else job.high_bytes
        least += count * shard.rows * shard.cols * (8 + 28 / replicas + blocks)
    return least


def _operand_bytes(job: Workload) -> float:
    format = job.contract.trainer_format
    return format.group_bytes if format.quantized else job.high_bytes
