"""Roofline estimates of the seconds of an RL step, for comparing layouts. Nothing here was measured on a GPU.

    train       micro-batches * (compute + tensor-parallel + expert-parallel traffic) / (1 - bubble) + gradients over replicas
    logprobs    the same without a backward pass, twice with a reference model, plus those of a teacher
    critic      values and optimizer steps of the critic
    generate    decoding, bound by reading weights and KV cache; at least as many steps as the longest completion has tokens
    sync        the busiest GPU's bytes by link (`estimate_sync_traffic`)

With `precision.reduction = "tree"`, row-parallel products of forward passes are bound by the kernel's reads from the L2 cache, and ranks
send FP32 partial sums.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.cost import weights
from megatron_rl.cost.hardware import CACHE_BANDWIDTH, LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.cost.operators import RankShapes, count_flops_per_token, count_linear_flops
from megatron_rl.cost.workload import MEAN_LENGTH_SHARE, Candidate, Workload
from megatron_rl.precision.contract import QUANTIZED_ROLES
from parallel.formats import BLOCK
from parallel.layout import Layout, count_stage_layers
from parallel.layout_hints import keep_rank_sizes
from parallel.row_sums import GATHERED_WHOLE, GPU_TILE, count_bytes_sent, count_parts

DECODE_ALL_REDUCE_LATENCY = 20e-6
"""Seconds of an all-reduce of few tokens within an engine; each layer has two. An assumption."""
NETWORK_ALL_REDUCE_LATENCY = 60e-6
"""Seconds of the same all-reduce in an engine on several nodes, in addition to the transfer. An assumption."""


def bubble_fraction(pp: int, vpp: int, micro_batches: int) -> float:
    """Return the share of a pipeline's time in which a stage waits (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    return (pp - 1) / (vpp * micro_batches + pp - 1)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one RL step by phase."""

    generate: float
    logprobs: float
    train: float
    critic: float = 0.0
    sync: float = 0.0
    bubble: float = 0.0
    """Share of the trainer's time in which a pipeline stage waits."""
    colocated: bool = True

    @property
    def trainer(self) -> float:
        return self.logprobs + self.critic + self.train

    @property
    def step(self) -> float:
        """Colocated, the phases run in turn; disaggregated, the engines generate while the trainer trains on the previous batch."""
        return (self.generate + self.trainer if self.colocated else max(self.generate, self.trainer)) + self.sync


def estimate_step_time(job: Workload, candidate: Candidate, cluster: Cluster) -> StepTime:
    """Return the seconds of all phases except the sync."""
    return replace(estimate_trainer(job, candidate.trainer_only, cluster), generate=estimate_generation(job, candidate, cluster))


@lru_cache(maxsize=1 << 16)
def estimate_trainer(job: Workload, candidate: Candidate, cluster: Cluster) -> StepTime:
    """Return the seconds of the trainer's phases."""
    policy, passes = _estimate_passes(job, candidate, cluster), 2 if job.has_reference else 1
    if job.teacher is not None:
        teacher = _estimate_passes(job.teacher, candidate, cluster).logprobs / passes
        policy = replace(policy, logprobs=policy.logprobs + teacher)
    if job.critic is None:
        return policy
    critic = _estimate_passes(job.critic, candidate, cluster)
    return replace(policy, critic=critic.logprobs / passes + critic.train)


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
    """Return the seconds of a micro-batch in the slowest stage: the last, which has the output layer, or one with more layers.

    Args:
        products: the work in units of a forward pass; a backward pass is two.
    """
    overlaps = candidate.at_once(job, trains=products > 1) > 1
    layer, output_layer = _estimate_layers(job, keep_rank_sizes(candidate.train), cluster, products, overlaps)
    layer += (2 if products == 4 else 1) * _slice_seconds(job, candidate, cluster)
    *others, last = count_stage_layers(job.model.layers, candidate.train)
    mtp_layers = job.trained_mtp_layers if products > 1 else 0  # each computes logits of its own
    return max((last + mtp_layers) * layer + (1 + mtp_layers) * output_layer, max(others, default=0) * layer)


def weigh_output_layer(job: Workload, layout: Layout, cluster: Cluster) -> float:
    """Return how many decoder layers take as long in training as the output layer and the multi-token prediction layers."""
    overlaps = Candidate(layout).at_once(job, trains=True) > 1
    layer, output_layer = _estimate_layers(job, keep_rank_sizes(layout), cluster, 3, overlaps)
    return (1 + job.trained_mtp_layers) * output_layer / layer + job.trained_mtp_layers


@lru_cache(maxsize=1 << 14)
def _estimate_layers(job: Workload, layout: Layout, cluster: Cluster, products: int, overlaps: bool) -> tuple[float, float]:
    """Return the seconds of one micro-batch in a layer, and in the output layer. `overlaps`: whether micro-batches take turns."""
    model = job.model
    linear, attention, outputs = count_flops_per_token(job)
    tokens, forwards = job.tokens_per_rank(layout.cp), 2 if products == 4 else 1
    if model.experts is not None:  # padding of the experts' rows is computed too
        shapes = RankShapes(job, layout, tokens)
        linear += (shapes.expert_rows / shapes.routed_rows - 1) * count_linear_flops(job, QUANTIZED_ROLES, only_experts=True)
    fp8 = job.contract.trainer_format.quantized and job.config.precision.backend != "emulated"
    rates, dtype = cluster.gpu.rates, "fp8" if fp8 else "bf16"
    weight_gradients = 1 if products > 1 and not job.trains_adapters else 0  # frozen weights have no gradients
    weighed = products - 1 if products > 1 else 1
    seconds = weighed * linear / rates[dtype] + products * attention / rates["attention"]
    seconds += weight_gradients * linear / rates["fp8 WGrad" if fp8 else "bf16"]
    seconds += forwards * _tree_seconds_per_token(job, rates[dtype], 1 if fp8 else 2)
    output_layer = tokens / layout.tp * (weighed + weight_gradients) * outputs / rates["bf16"]
    compute = tokens / layout.tp * seconds / model.layers
    # per layer and direction two all-reduces, or pairs of all-gather and reduce-scatter; recomputation repeats those of the forward pass
    directions = {1: 1, 3: 2, 4: 3}[products]
    sent = 2 * directions * count_bytes_sent(layout.tp, job.high_bytes, False, by_tree=False)
    sent += 2 * forwards * _tree_bytes(job, layout.tp)
    of_tokens, exchange = tokens * model.hidden * sent / _bandwidth(layout.tp, cluster), 0.0
    if model.experts is not None and layout.ep > 1:  # to the experts and back
        rows = tokens * model.hidden * job.high_bytes / layout.tp * job.top_k * (layout.ep - 1) / layout.ep
        ranks = range(0, layout.ep * layout.etp, layout.etp)
        # without a gradient, quantized data and scales are sent to the experts
        saved = 1 - (1 + 4 / BLOCK) / job.high_bytes if fp8 and not job.contract.sums_by_tree and products != 3 else 0
        exchange += cluster.exchange_seconds("all-to-all", ranks, (2 * directions - saved) * rows)
    if layout.cp > 1:  # tokens for heads and back (q, k, v and the result), as mcore.passes.context_parallel does
        moved = sum(kind.moved_heads for kind in model.attention) / model.layers
        width = moved / layout.tp * (layout.cp - 1) / layout.cp
        exchange += directions * tokens * width * job.high_bytes / _bandwidth(layout.tp * layout.cp, cluster)
    if not overlaps:
        return compute + of_tokens + exchange, output_layer
    if job.contract.trainer_format.quantized:  # another micro-batch computes during the exchange
        return max(compute, of_tokens + exchange), output_layer
    return max(compute, exchange) + of_tokens, output_layer  # Megatron's linear layers wait for tensor-parallel ranks


def _tree_seconds_per_token(job: Workload, rate: float, operand_bytes: int) -> float:
    """Return the additional seconds of a forward pass's row-parallel products by tree.

    The kernel reads 2 * `GPU_TILE` rows of operands from the cache for `GPU_TILE`^2 results.
    """
    if not job.contract.sums_by_tree:
        return 0.0
    tree_rate = min(rate, CACHE_BANDWIDTH * GPU_TILE / operand_bytes)
    return count_linear_flops(job, frozenset({"attention_output", "mlp_out"})) * (1 / tree_rate - 1 / rate)


def _tree_bytes(job: Workload, ranks: int) -> float:
    """Return the additional bytes that a rank sends per result of a sum by tree."""
    if not job.contract.sums_by_tree:
        return 0.0
    return count_bytes_sent(ranks, job.high_bytes, True) - count_bytes_sent(ranks, job.high_bytes, True, by_tree=False)


def _slice_seconds(job: Workload, candidate: Candidate, cluster: Cluster) -> float:
    """Return the additional seconds of a layer's two row-parallel sums in a forward pass whose ranks hold several parts of them each
    (`precision.reduction = "ranks"`): products of slices are written, read, and sent."""
    layout = candidate.train
    slices = count_parts(layout.tp, job.config.rollout.tp) // layout.tp if job.contract.sums_by_ranks else 1
    if slices == 1:
        return 0.0
    results = 2 * job.tokens_per_rank(layout.cp) * job.model.hidden
    sent = (slices - 1) * count_bytes_sent(layout.tp, job.high_bytes, True, by_tree=False)
    return cluster.gpu.memory_seconds(results * 2 * slices * job.high_bytes) + results * sent / _bandwidth(layout.tp, cluster)


def _bandwidth(ranks: int, cluster: Cluster) -> float:
    """Return the bytes/s between neighbors of a group of `ranks` consecutive GPUs."""
    return LINK_EFFICIENCY * (cluster.gpu.nvlink if ranks <= cluster.nvlink_gpus else NETWORK_BANDWIDTH)


def _estimate_replica_exchange(job: Workload, candidate: Candidate, cluster: Cluster) -> float:
    """Return the seconds to reduce-scatter FP32 gradients over the replicas and to gather the new weights, without overlap."""
    layout = candidate.train
    ranks = layout.dp * layout.cp
    stages = [weights.count_trainer_memory(job, layout, stage) for stage in weights.list_extreme_stages(job, layout)]
    stepped = [stage.gradients * job.high_bytes // 4 if job.trains_adapters else stage.weights + stage.blocks for stage in stages]
    moved = max(stage.gradients + size for stage, size in zip(stages, stepped, strict=True)) * (ranks - 1) / ranks
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
    prompts = share / rollout.group_size * job.config.data.max_prompt_tokens  # at best a group's prompt is read once
    return tokens * decode + prompts * flops / (tp * cluster.gpu.rates["bf16"])


def _estimate_decode_step(job: Workload, candidate: Candidate, cluster: Cluster, running: int) -> float:
    """Return the seconds of one token for each of `running` sequences."""
    read: float = weights.count_engine_weights(job, candidate.rollout_tp, candidate.rollout_ep)
    if job.model.experts is not None:  # experts that no token of the batch chose are not read
        read *= 1 - (1 - job.top_k / job.model.experts.count) ** running
    read += running * job.mean_sequence * weights.count_kv_bytes_per_token(job, candidate.rollout_tp)
    read += 2 * running * weights.count_state_bytes_per_request(job, candidate.rollout_tp)  # read and written
    compute = running * sum(count_flops_per_token(job)) / (candidate.rollout_tp * cluster.gpu.rates["bf16"])
    tp, results, by_tree = candidate.rollout_tp, running * job.model.hidden, job.contract.sums_by_tree
    messages = 2 if by_tree and results > GATHERED_WHOLE else 1
    all_reduce = messages * DECODE_ALL_REDUCE_LATENCY if tp > 1 else 0.0
    if candidate.nodes_per_engine > 1:
        sent = 4 * (tp - 1) if by_tree and messages == 1 else count_bytes_sent(tp, job.high_bytes, False, by_tree)
        all_reduce = messages * NETWORK_ALL_REDUCE_LATENCY + results * sent / (LINK_EFFICIENCY * NETWORK_BANDWIDTH)
    return max(cluster.gpu.memory_seconds(read), compute) + 2 * job.model.layers * all_reduce
