"""Seconds of a step by rooflines: the data sheets' rates times the shares below. Estimates for comparing layouts; nothing here was
measured on a GPU.

    train       micro-batches * (compute + tensor-parallel + expert-parallel traffic) / (1 - bubble) + gradients over replicas
    logprobs    the same without backward pass, twice where there is a reference model, and those of a teacher
    critic      both, of the critic: its values and its optimizer steps
    generate    decoding, bound by reading weights and KV cache; at least as many steps as the longest answer has tokens
    sync        the busiest GPU's bytes by link (`estimate_sync_traffic`)

With `precision.reduction = "tree"` row-parallel products of forward passes are bound by our kernel's reads from the GPU's cache, and ranks
send FP32 partial sums.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.planner import memory
from megatron_rl.planner.activation_memory import FormulaInputs
from megatron_rl.planner.candidate import MEAN_LENGTH_SHARE, Candidate, Workload
from megatron_rl.planner.hardware import CACHE_BANDWIDTH, LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.precision.contract import QUANTIZED_ROLES
from parallel.formats import BLOCK
from parallel.layout import Layout
from parallel.row_sums import GATHERED_WHOLE, GPU_TILE, count_bytes_sent
from parallel.stages import count_stage_layers

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
    critic: float = 0.0
    sync: float = 0.0
    bubble: float = 0.0
    colocated: bool = True

    @property
    def trainer(self) -> float:
        return self.logprobs + self.critic + self.train

    @property
    def step(self) -> float:
        """Colocated, one phase after the other; disaggregated, the engines generate while the trainer trains on the batch before."""
        return (self.generate + self.trainer if self.colocated else max(self.generate, self.trainer)) + self.sync


def compare_reductions(job: Workload, candidate: Candidate, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a step without its sync, for each value of `precision.reduction`."""
    config, seconds = job.config, {}
    for reduction in ("tree", "fast"):
        precision = config.precision.model_copy(update={"reduction": reduction})
        other = replace(job, config=config.model_copy(update={"precision": precision}))
        seconds[reduction] = estimate_step_time(other, candidate, cluster).step
    return seconds


def estimate_step_time(job: Workload, candidate: Candidate, cluster: Cluster) -> StepTime:
    """Return the seconds of all phases but the sync."""
    return replace(_estimate_trainer(job, candidate.trainer_only, cluster), generate=estimate_generation(job, candidate, cluster))


@lru_cache(maxsize=1 << 16)
def _estimate_trainer(job: Workload, candidate: Candidate, cluster: Cluster) -> StepTime:
    policy = _estimate_passes(job, candidate, cluster)
    if job.teacher is not None:
        teacher = _estimate_passes(job.teacher, candidate, cluster).logprobs / (2 if job.has_reference else 1)
        policy = replace(policy, logprobs=policy.logprobs + teacher)
    if job.critic is None:
        return policy
    critic = _estimate_passes(job.critic, candidate, cluster)
    values = critic.logprobs / (2 if job.has_reference else 1)
    return replace(policy, critic=values + critic.train)


def _estimate_passes(job: Workload, candidate: Candidate, cluster: Cluster) -> StepTime:
    layout, updates, micro_batches = candidate.train, job.config.algorithm.updates_per_step, candidate.micro_batches(job)
    bubble = bubble_fraction(layout.pp, layout.vpp, -(-micro_batches // candidate.at_once(job, trains=True)))
    forward_backward = _estimate_micro_batch(job, candidate, cluster, products=3 if candidate.recompute == "none" else 4)
    train = updates * (forward_backward * micro_batches / (1 - bubble) + _estimate_replica_exchange(job, candidate, cluster))
    forward = _estimate_micro_batch(job, candidate, cluster, products=1) * (
        updates * micro_batches + (layout.pp - 1) * candidate.at_once(job, trains=False)
    )
    return StepTime(0, (2 if job.has_reference else 1) * forward, train, bubble=bubble, colocated=candidate.colocated)


def _estimate_micro_batch(job: Workload, candidate: Candidate, cluster: Cluster, products: int) -> float:
    """Return the seconds of one micro-batch in the slowest stage, for which the others wait: the last, which alone has the output layer,
    or one with more layers. `products`: the work in forward passes (a backward pass is two)."""
    layer, output_layer = _estimate_layers(job, candidate, cluster, products)
    *others, last = count_stage_layers(job.model.layers, candidate.train)
    ahead = job.trained_mtp_layers if products > 1 else 0  # each scores its states
    return max((last + ahead) * layer + (1 + ahead) * output_layer, max(others, default=0) * layer)


def weigh_output_layer(job: Workload, layout: Layout, cluster: Cluster) -> float:
    """Return how many layers take as long in training as the output layer, and layers for multi-token prediction, which are there too."""
    layer, output_layer = _estimate_layers(job, Candidate(layout), cluster, products=3)
    return (1 + job.trained_mtp_layers) * output_layer / layer + job.trained_mtp_layers


def _estimate_layers(job: Workload, candidate: Candidate, cluster: Cluster, products: int) -> tuple[float, float]:
    """Return the seconds of one micro-batch in a layer, and in the output layer."""
    layout, model = candidate.train, job.model
    linear, attention, outputs = count_flops_per_token(job)
    tokens, forwards = job.tokens_per_rank(layout.cp), 2 if products == 4 else 1
    if model.experts is not None:  # they compute their padding, too
        inputs = FormulaInputs(job, layout, tokens)
        linear += (inputs.expert_rows / inputs.routed_rows - 1) * _count_linear_flops(job, QUANTIZED_ROLES, of_experts=True)
    fp8 = job.contract.trainer_format.quantized and job.config.precision.backend != "emulated"
    rate = cluster.gpu.fp8 if fp8 else cluster.gpu.bf16
    weight_gradients = 1 if job.trains_adapters and products > 1 else 0  # frozen weights have none, and adapters' products are narrow
    weighed = products - weight_gradients
    seconds = (weighed * linear / rate + products * attention / cluster.gpu.bf16) / COMPUTE_EFFICIENCY
    seconds += forwards * _tree_seconds_per_token(job, rate, 1 if fp8 else 2)
    output_layer = tokens / layout.tp * weighed * outputs / cluster.gpu.bf16 / COMPUTE_EFFICIENCY
    compute = tokens / layout.tp * seconds / model.layers
    activation = tokens * model.hidden * job.high_bytes
    # in each layer, two all-reduces, or pairs of all-gather and reduce-scatter, per direction; recomputation repeats the forward's
    directions = {1: 1, 3: 2, 4: 3}[products]
    sent = 2 * directions * count_bytes_sent(layout.tp, job.high_bytes, False, by_tree=False)
    sent += 2 * forwards * _tree_bytes(job, layout.tp)
    tensor_traffic = tokens * model.hidden * sent / _bandwidth(layout.tp, cluster)
    expert_traffic = context_traffic = 0.0
    if model.experts is not None and layout.ep > 1:  # to the experts and back
        rows = activation / layout.tp * job.top_k * (layout.ep - 1) / layout.ep
        # bytes and scales go to the experts where no gradient is wanted
        saved = 1 - (1 + 4 / BLOCK) / job.high_bytes if fp8 and not job.contract.sums_by_tree and products != 3 else 0
        expert_traffic = (2 * directions - saved) * rows / _bandwidth(layout.ep * layout.etp, cluster)
    if layout.cp > 1:  # tokens for heads and back (q, k, v and the result), as mcore.passes.context_parallel does
        heads = 2 * model.heads + 2 * model.kv_heads
        width = heads * model.head_dim / layout.tp * (layout.cp - 1) / layout.cp
        context_traffic = directions * tokens * width * job.high_bytes / _bandwidth(layout.tp * layout.cp, cluster)
    exchange = tensor_traffic + expert_traffic
    if candidate.at_once(job, trains=products > 1) > 1:  # the other micro-batch computes meanwhile
        return max(compute, exchange) + context_traffic, output_layer
    return compute + exchange + context_traffic, output_layer


def _tree_seconds_per_token(job: Workload, rate: float, operand_bytes: int) -> float:
    """Return how much longer the row-parallel products of a forward pass take by the tree: our kernel reads 2 * `GPU_TILE` rows of operands
    for `GPU_TILE`^2 results, from the cache."""
    if not job.contract.sums_by_tree:
        return 0.0
    tree_rate = min(COMPUTE_EFFICIENCY * rate, CACHE_BANDWIDTH * GPU_TILE / operand_bytes)
    return _count_linear_flops(job, frozenset({"attention_output", "mlp_out"})) * (1 / tree_rate - 1 / (COMPUTE_EFFICIENCY * rate))


def _tree_bytes(job: Workload, ranks: int) -> float:
    """Return how many bytes more a rank sends for a result by the tree, with or without sequence parallelism."""
    if not job.contract.sums_by_tree:
        return 0.0
    return count_bytes_sent(ranks, job.high_bytes, True) - count_bytes_sent(ranks, job.high_bytes, True, by_tree=False)


@lru_cache(maxsize=32)
def _count_linear_flops(job: Workload, roles: frozenset[str], of_experts: bool = False) -> float:
    """Return the forward FLOPs of a token in layers of these roles, or in those of experts alone: 2 for each weight that it meets."""
    share = job.top_k / job.model.experts.count if job.model.experts else 1.0
    return sum(
        2 * rect.rows * rect.cols * (1 if weight.expert is None else share)
        for weight in itertools.chain(*job.scored.model.list_weights())
        for tensor, rect, *_ in weight.pieces
        if tensor.role in roles and (weight.expert is not None or not of_experts)
    )


def count_flops_per_token(job: Workload) -> tuple[float, float, float]:
    """Return the forward FLOPs of (linear layers that the contract quantizes, attention, output layer): of causal attention over sequences
    of mean length s, 4 s/2 d for each head and layer."""
    model = job.model
    attention = 2 * job.mean_sequence * model.heads * model.head_dim * model.layers
    outputs = 1 if model.value_head else model.vocab
    return _count_linear_flops(job, QUANTIZED_ROLES), attention, 2 * outputs * model.hidden


def _bandwidth(ranks: int, cluster: Cluster) -> float:
    """Return the bytes/s between neighbors of a group of this many consecutive GPUs."""
    return LINK_EFFICIENCY * (cluster.gpu.nvlink if ranks <= cluster.gpus_per_node else NETWORK_BANDWIDTH)


def _estimate_replica_exchange(job: Workload, candidate: Candidate, cluster: Cluster) -> float:
    """Return the seconds to reduce-scatter FP32 gradients over the replicas and to gather the stepped weights, once per optimizer step and
    nothing of it overlapped."""
    layout = candidate.train
    ranks, stages = layout.dp * layout.cp, [memory.count_trainer_memory(job, layout, stage) for stage in candidate.extreme_stages]
    stepped = [stage.gradients * job.high_bytes // 4 if job.trains_adapters else stage.weights + stage.blocks for stage in stages]
    moved = max(stage.gradients + weights for stage, weights in zip(stages, stepped, strict=True)) * (ranks - 1) / ranks
    return moved / _bandwidth(layout.tp * ranks, cluster)


def estimate_generation(job: Workload, candidate: Candidate, cluster: Cluster) -> float:
    """Return the seconds until all completions of a step are sampled."""
    rollout, tp = job.config.rollout, candidate.rollout_tp
    share = -(-job.sequences // candidate.engines)
    in_cache = max(1, int(rollout.max_total_tokens / job.mean_sequence))
    running = min(share, rollout.max_running_requests, in_cache)
    decode = _estimate_decode_step(job, candidate, cluster, running)
    tokens = max(share / running * (MEAN_LENGTH_SHARE * rollout.max_new_tokens), rollout.max_new_tokens)
    flops = sum(count_flops_per_token(job))
    prompts = share / rollout.group_size * job.config.data.max_prompt_tokens  # a group's prompt is read once at best
    return tokens * decode + prompts * flops / (tp * cluster.gpu.bf16 * COMPUTE_EFFICIENCY)


def _estimate_decode_step(job: Workload, candidate: Candidate, cluster: Cluster, running: int) -> float:
    """Return the seconds of one token for each of `running` sequences."""
    weights: float = memory.count_engine_weights(job, candidate.rollout_tp, candidate.rollout_ep)
    if job.model.experts is not None:  # experts that no token of the batch chose are not read
        weights *= 1 - (1 - job.top_k / job.model.experts.count) ** running
    cache = running * job.mean_sequence * memory.count_kv_bytes_per_token(job, candidate.rollout_tp)
    compute = running * sum(count_flops_per_token(job)) / (candidate.rollout_tp * cluster.gpu.bf16 * COMPUTE_EFFICIENCY)
    tp, results, by_tree = candidate.rollout_tp, running * job.model.hidden, job.contract.sums_by_tree
    messages = 2 if by_tree and results > GATHERED_WHOLE else 1
    all_reduce = messages * DECODE_ALL_REDUCE_LATENCY if tp > 1 else 0.0
    if candidate.nodes_per_engine > 1:
        sent = 4 * (tp - 1) if by_tree and messages == 1 else count_bytes_sent(tp, job.high_bytes, False, by_tree)
        all_reduce = messages * NETWORK_ALL_REDUCE_LATENCY + results * sent / (LINK_EFFICIENCY * NETWORK_BANDWIDTH)
    return max((weights + cache) / (LINK_EFFICIENCY * cluster.gpu.hbm), compute) + 2 * job.model.layers * all_reduce
