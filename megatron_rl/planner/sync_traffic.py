"""What one sync moves over which link, and the seconds that the links' bandwidths allow: an estimate, but for the bytes.

The bytes are those of the real reshard plan (`parallel.reshard`), whose layers of one kind are alike: one of each is planned, stage by
stage, and counted as often as the stage has it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from megatron_rl.planner.candidate import Candidate, Job
from megatron_rl.planner.hardware import LINK_SHARE, NETWORK, Cluster
from megatron_rl.planner.memory import layer_counts
from parallel.formats import SCHEMES
from parallel.layout_hints import one_of_each_layer
from parallel.megatron_shards import trainer_shards
from parallel.reshard import Copy, reshard
from parallel.sglang_shards import engine_shards

LINKS = ("same", "node", "network")
"""Within a GPU, to another one of its node, to another node."""


@dataclass(frozen=True)
class SyncLoad:
    """Bytes by link."""

    total: dict[str, int]
    busiest: dict[str, int]
    """What the GPU that has most of a link's bytes sends or receives over it."""
    seconds: float
    """The busiest GPU's, its links one after the other, with the copies into and out of buffers."""


def sync_load(job: Job, candidate: Candidate, cluster: Cluster) -> SyncLoad:
    """Of all engines together. Raises GeometryError where the layouts have no plan."""
    sent: dict[tuple[int, str], int] = defaultdict(int)
    received: dict[tuple[int, str], int] = defaultdict(int)
    for stage in range(candidate.train.pp):
        for (source, target), count in _stage_bytes(job, candidate, stage).items():
            same_node = cluster.node_of(source) == cluster.node_of(target)
            link = "same" if source == target else "node" if same_node else "network"
            sent[source, link] += count
            received[target, link] += count
    busiest = {link: max((load[key] for load in (sent, received) for key in load if key[1] == link), default=0) for link in LINKS}
    total = {link: sum(count for key, count in received.items() if key[1] == link) for link in LINKS}
    gpus = {gpu for gpu, _ in (*sent, *received)}
    slowest = max(_seconds(gpu, sent, received, cluster) for gpu in gpus)
    return SyncLoad(total, busiest, slowest / LINK_SHARE)


def _seconds(gpu: int, sent: dict[tuple[int, str], int], received: dict[tuple[int, str], int], cluster: Cluster) -> float:
    out, into = ({link: load.get((gpu, link), 0) for link in LINKS} for load in (sent, received))
    hbm = cluster.gpu.hbm / 2  # a copy reads and writes
    packed = (sum(out.values()) + sum(into.values())) / hbm
    return packed + sum(max(out[link], into[link]) / rate for link, rate in (("node", cluster.gpu.nvlink), ("network", NETWORK)))


def _stage_bytes(job: Job, candidate: Candidate, stage: int) -> dict[tuple[int, int], int]:
    """(trainer's GPU, engine's GPU) -> bytes that a pipeline stage gives."""
    width = candidate.train.world_size // candidate.train.pp
    gpu_of = {rank: candidate.engine_gpu(rank) for rank in range(candidate.engine_gpus)}
    homes = {rank: gpu - stage * width for rank, gpu in gpu_of.items() if 0 <= gpu - stage * width < width}
    found: dict[tuple[int, int], int] = defaultdict(int)
    times = _times(job, candidate, stage)
    for copy in _one_of_each_layer(job, candidate, homes):
        if count := times[_part(copy.tensor)]:
            found[stage * width + copy.source_rank, gpu_of[copy.target_rank]] += count * _bytes(job, copy)
    return found


def _one_of_each_layer(job: Job, candidate: Candidate, homes: dict[int, int]) -> list[Copy]:
    one, roles = one_of_each_layer(job.model), job.contract.fp8_roles()
    sources = trainer_shards(one, replace(candidate.train, pp=1, vpp=1), quantised=bool(roles))
    targets = engine_shards(one, candidate.rollout_tp, candidate.rollout_ep, candidate.engines)
    return reshard(sources, targets, roles, homes, job.contract.int8_roles())


def _times(job: Job, candidate: Candidate, stage: int) -> dict[str, int]:
    """How often a stage has each part of `one_of_each_layer`."""
    found = {str(layer): count for layer, count in enumerate(layer_counts(job.model, candidate.train, stage))}
    last = int(stage == candidate.train.pp - 1)
    return found | {"embed_tokens": int(stage == 0), "norm": last, "lm_head": last}


def _part(tensor: str) -> str:
    """`3` of model.layers.3.mlp.up_proj.weight, `embed_tokens` of model.embed_tokens.weight."""
    parts = tensor.removeprefix("model.").split(".")
    return parts[1] if parts[0] == "layers" else parts[0]


def _bytes(job: Job, copy: Copy) -> int:
    """Of data and scales, as `parallel.reshard.moves` tells them."""
    rect = copy.target_rect
    scheme = SCHEMES.get(copy.kind)
    if scheme is None:
        return rect.rows * rect.cols * (4 if copy.kind == "fp32" else job.high_bytes)
    rows, cols = scheme.grid(rect.rows, rect.cols)
    scales = 0 if scheme.whole_rows and rect.col else rows * cols
    return rect.rows * rect.cols + 4 * scales
