"""Bytes that one sync moves over each link, and the seconds that the links' bandwidths allow. Only the seconds are an estimate.

The bytes come from the real reshard plan (`parallel.reshard`). Layers of one kind are equal, so one layer of each kind is planned per stage
and multiplied by its count.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from megatron_rl.cost.hardware import LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.cost.weights import count_layer_kinds
from megatron_rl.cost.workload import Candidate, Workload
from parallel.adapters import is_adapter
from parallel.layout_hints import keep_one_layer_per_kind
from parallel.megatron_shards import build_trainer_shards
from parallel.reshard import Transfer, add_scale_transfers, reshard
from parallel.sglang_shards import build_engine_shards

LINKS = ("same", "node", "network")
"""Within a GPU, to another GPU of the node, and to another node."""


@dataclass(frozen=True)
class SyncTraffic:
    """Bytes of one sync by link."""

    total: dict[str, int]
    busiest: dict[str, int]
    """The most bytes that one GPU sends or receives over a link."""
    seconds: float
    """Seconds of the busiest GPU, with its links in turn and the copies into and out of buffers."""
    readers: int
    """The most engine ranks on other GPUs that one trainer GPU sends to."""
    first: int
    """Bytes of the first sync over all links. With LoRA, the later syncs, which the other fields describe, send adapters only."""


def estimate_sync_traffic(job: Workload, candidate: Candidate, cluster: Cluster) -> SyncTraffic:
    """Return the traffic of a sync to all engines. Raise GeometryError if no plan exists for the layouts."""
    sent: dict[tuple[int, str], int] = defaultdict(int)
    received: dict[tuple[int, str], int] = defaultdict(int)
    pairs, first = set[tuple[int, int]](), 0
    for stage in range(candidate.train.pp):
        whole, later = _count_stage_bytes(job, candidate, stage)
        first += sum(whole.values())
        pairs |= whole.keys()
        for (source, target), count in later.items():
            same_node = cluster.node_of(source) == cluster.node_of(target)
            link = "same" if source == target else "node" if same_node else "network"
            sent[source, link] += count
            received[target, link] += count
    busiest = {link: max((load[key] for load in (sent, received) for key in load if key[1] == link), default=0) for link in LINKS}
    total = {link: sum(count for key, count in received.items() if key[1] == link) for link in LINKS}
    gpus = {gpu for gpu, _ in (*sent, *received)}
    slowest = max(_estimate_seconds(gpu, sent, received, cluster) for gpu in gpus)
    readers = Counter(source for source, target in pairs if source != target)
    return SyncTraffic(total, busiest, slowest / LINK_EFFICIENCY, max(readers.values(), default=0), first)


def _estimate_seconds(gpu: int, sent: dict[tuple[int, str], int], received: dict[tuple[int, str], int], cluster: Cluster) -> float:
    """Return the seconds of a GPU at full bandwidths."""
    out, into = ({link: load.get((gpu, link), 0) for link in LINKS} for load in (sent, received))
    hbm = cluster.gpu.hbm / 2  # a transfer reads and writes
    packed = (sum(out.values()) + sum(into.values())) / hbm
    return packed + sum(max(out[link], into[link]) / rate for link, rate in (("node", cluster.gpu.nvlink), ("network", NETWORK_BANDWIDTH)))


def _count_stage_bytes(job: Workload, candidate: Candidate, stage: int) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return the bytes that a pipeline stage sends by (trainer's GPU, engine's GPU), for the first sync and for later ones."""
    width = candidate.train.world_size // candidate.train.pp
    gpu_of = {rank: candidate.engine_gpu(rank) for rank in range(candidate.engine_gpus)}
    homes = {rank: gpu - stage * width for rank, gpu in gpu_of.items() if 0 <= gpu - stage * width < width}
    whole: dict[tuple[int, int], int] = defaultdict(int)
    adapters: dict[tuple[int, int], int] = defaultdict(int)
    last = int(stage == candidate.train.pp - 1)
    counts = {str(layer): count for layer, count in enumerate(count_layer_kinds(job.model, candidate.train, stage))}
    counts |= {"embed_tokens": int(stage == 0), "norm": last, "lm_head": last}
    for transfer in _plan_one_layer_per_kind(job, candidate, homes):
        parts = transfer.tensor.removeprefix(job.model.prefix).split(".")
        if count := counts[parts[1] if parts[0] == "layers" else parts[0]]:
            link = stage * width + transfer.source_rank, gpu_of[transfer.target_rank]
            whole[link] += count * transfer.nbytes
            if is_adapter(transfer.source):
                adapters[link] += count * transfer.nbytes
    return whole, adapters if job.trains_adapters else whole


def _plan_one_layer_per_kind(job: Workload, candidate: Candidate, homes: dict[int, int]) -> list[Transfer]:
    model, format_of = keep_one_layer_per_kind(job.model), job.contract.format_of
    sources = build_trainer_shards(model, candidate.train.one_stage, format_of=format_of)
    targets = build_engine_shards(model, candidate.rollout_tp, candidate.rollout_ep, candidate.engines)
    return add_scale_transfers(reshard(sources, targets, format_of, homes))
