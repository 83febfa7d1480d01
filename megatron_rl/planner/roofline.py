"""Seconds of a step by rooflines: the data sheets' rates times the shares below. Estimates for comparing layouts; nothing here was
measured on a GPU.

    train       micro-batches * (compute + tensor-parallel + expert-parallel traffic) / (1 - bubble) + gradients over replicas
    logprobs    the same without backward pass, twice where there is a reference model
    generate    decoding, bound by reading weights and KV cache; at least as many steps as the longest answer has tokens
    sync        the busiest GPU's bytes by link (`estimate_sync_traffic`)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.planner import memory
from megatron_rl.planner.candidate import MEAN_LENGTH_SHARE, Candidate, Workload
from megatron_rl.planner.hardware import LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.precision.contract import QUANTIZED_ROLES

COMPUTE_EFFICIENCY = 0.35
"""Share of the peak rate of dense products that training reaches. An assumption."""
DECODE_ALL_REDUCE_LATENCY = 20e-6
"""Seconds of one all-reduce of few tokens within an engine; two in every layer. An assumption."""
NETWORK_ALL_REDUCE_LATENCY = 60e-6
"""The same in an engine on several nodes, where the bytes take time too. An assumption."""


def bubble_fraction(pp: int, vpp: int, micro_batches: int) -> float:
    """Return the share of a pipeline's time in which a stage waits: (pp - 1) / (vpp m + pp - 1) of the whole, which is (pp - 1) / (vpp m)
    of the work (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    return (pp - 1) / (vpp * micro_batches + pp - 1)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one RL step by phase. `bubble`: share of the trainer's time in which a pipeline stage waits."""

    generate: float
    logprobs: float
    train: float
    sync: float = 0.0
    bubble: float = 0.0
    colocated: bool = True

    @property
    def trainer(self) -> float:
        return self.logprobs + self.train

    @property
    def step(self) -> float:
        """Colocated, one phase after the other; disaggregated, the engines generate while the trainer trains on the batch before."""
        return (self.generate + self.trainer if self.colocated else max(self.generate, self.trainer)) + self.sync


def estimate_step_time(job: Workload, candidate: Candidate, cluster: Cluster) -> StepTime:
    """Return the seconds of all phases but the sync."""
    return replace(_estimate_trainer(job, candidate.trainer_only, cluster), generate=estimate_generation(job, candidate, cluster))


@lru_cache(maxsize=1 << 16)
def _estimate_trainer(job: Workload, candidate: Candidate, cluster: Cluster) -> StepTime:
    layout, updates, micro_batches = candidate.train, job.config.algorithm.updates_per_step, candidate.micro_batches(job)
    bubble = bubble_fraction(layout.pp, layout.vpp, micro_batches)
    forward_backward = _estimate_micro_batch(job, candidate, cluster, products=3 if candidate.recompute == "none" else 4)
    train = updates * (forward_backward * micro_batches / (1 - bubble) + _estimate_replica_exchange(job, candidate, cluster))
    forward = _estimate_micro_batch(job, candidate, cluster, products=1) * (updates * micro_batches + layout.pp - 1)
    return StepTime(0, (2 if job.has_reference else 1) * forward, train, bubble=bubble, colocated=candidate.colocated)


def _estimate_micro_batch(job: Workload, candidate: Candidate, cluster: Cluster, products: int) -> float:
    """Return the seconds of one micro-batch in one stage; `products`: the work in forward passes (a backward pass is two)."""
    layout, model = candidate.train, job.model
    linear, rest = count_flops_per_token(job)
    rate = cluster.gpu.fp8 if job.contract.trainer_format.quantized and job.config.precision.backend != "emulated" else cluster.gpu.bf16
    tokens = job.tokens_per_rank(layout.cp)
    compute = products * tokens / (layout.tp * layout.pp) * (linear / rate + rest / cluster.gpu.bf16) / COMPUTE_EFFICIENCY
    layers = model.layers / layout.pp
    activation = tokens * model.hidden * job.high_bytes
    # two all-reduces, or pairs of all-gather and reduce-scatter, per layer and direction; recomputation repeats the forward's
    directions = {1: 1, 3: 2, 4: 3}[products]
    tensor_traffic = directions * layers * 2 * _all_reduce_factor(layout.tp) * activation / _bandwidth(layout.tp, cluster)
    expert_traffic = context_traffic = 0.0
    if model.experts is not None and layout.ep > 1:  # to the experts and back
        rows = activation / layout.tp * job.top_k * (layout.ep - 1) / layout.ep
        expert_traffic = directions * layers * 2 * rows / _bandwidth(layout.ep * layout.etp, cluster)
    if layout.cp > 1:  # tokens for heads and back (q, k, v and the result), as mcore.context_parallel does
        heads = 2 * model.heads + 2 * model.kv_heads
        width = heads * model.head_dim / layout.tp * (layout.cp - 1) / layout.cp
        context_traffic = directions * layers * tokens * width * job.high_bytes / _bandwidth(layout.tp * layout.cp, cluster)
    return compute + tensor_traffic + expert_traffic + context_traffic


@lru_cache(maxsize=16)
def count_flops_per_token(job: Workload) -> tuple[float, float]:
    """Return the forward FLOPs of (linear layers that the contract quantizes, attention and output layer): 2 for each weight that a token
    meets, 4 s/2 d for each head and layer of causal attention over sequences of mean length s."""
    model, linear = job.model, 0.0
    share = job.top_k / model.experts.count if model.experts else 1.0
    for weight in itertools.chain(*model.list_weights()):
        for tensor, rect, *_ in weight.pieces:
            if tensor.role in QUANTIZED_ROLES:
                linear += 2 * rect.rows * rect.cols * (1 if weight.expert is None else share)
    attention = 2 * job.mean_sequence * model.heads * model.head_dim * model.layers
    return linear, attention + 2 * model.vocab * model.hidden


def _all_reduce_factor(ranks: int) -> float:
    """Return the bytes that an all-reduce of one byte sends on each rank."""
    return 2 * (ranks - 1) / ranks


def _bandwidth(ranks: int, cluster: Cluster) -> float:
    """Return the bytes/s between neighbors of a group of this many consecutive GPUs."""
    return LINK_EFFICIENCY * (cluster.gpu.nvlink if ranks <= cluster.gpus_per_node else NETWORK_BANDWIDTH)


def _estimate_replica_exchange(job: Workload, candidate: Candidate, cluster: Cluster) -> float:
    """Return the seconds to reduce-scatter FP32 gradients over the replicas and to gather the stepped weights, once per optimizer step and
    nothing of it overlapped."""
    layout = candidate.train
    ranks, stages = layout.dp * layout.cp, [memory.count_trainer_memory(job, layout, stage) for stage in candidate.extreme_stages]
    moved = max(stage.gradients + stage.weights + stage.blocks for stage in stages) * (ranks - 1) / ranks
    return moved / _bandwidth(layout.tp * ranks, cluster)


def estimate_generation(job: Workload, candidate: Candidate, cluster: Cluster) -> float:
    """Return the seconds until all completions of a step are sampled."""
    rollout, tp = job.config.rollout, candidate.rollout_tp
    share = -(-job.sequences // candidate.engines)
    in_cache = max(1, int(rollout.max_total_tokens / job.mean_sequence))
    running = min(share, rollout.max_running_requests, in_cache)
    decode = _estimate_decode_step(job, candidate, cluster, running)
    tokens = max(share / running * (MEAN_LENGTH_SHARE * rollout.max_new_tokens), rollout.max_new_tokens)
    linear, rest = count_flops_per_token(job)
    prompts = share / rollout.group_size * job.config.data.max_prompt_tokens  # a group's prompt is read once at best
    return tokens * decode + prompts * (linear + rest) / (tp * cluster.gpu.bf16 * COMPUTE_EFFICIENCY)


def _estimate_decode_step(job: Workload, candidate: Candidate, cluster: Cluster, running: int) -> float:
    """Return the seconds of one token for each of `running` sequences."""
    weights: float = memory.count_engine_weights(job, candidate.rollout_tp, candidate.rollout_ep)
    if job.model.experts is not None:  # experts that no token of the batch chose are not read
        weights *= 1 - (1 - job.top_k / job.model.experts.count) ** running
    cache = running * job.mean_sequence * memory.count_kv_bytes_per_token(job, candidate.rollout_tp)
    linear, rest = count_flops_per_token(job)
    compute = running * (linear + rest) / (candidate.rollout_tp * cluster.gpu.bf16 * COMPUTE_EFFICIENCY)
    all_reduce = DECODE_ALL_REDUCE_LATENCY if candidate.rollout_tp > 1 else 0.0
    if candidate.nodes_per_engine > 1:
        sums = running * job.model.hidden * job.high_bytes
        all_reduce = NETWORK_ALL_REDUCE_LATENCY + _all_reduce_factor(candidate.rollout_tp) * sums / (LINK_EFFICIENCY * NETWORK_BANDWIDTH)
    return max((weights + cache) / (LINK_EFFICIENCY * cluster.gpu.hbm), compute) + 2 * job.model.layers * all_reduce
