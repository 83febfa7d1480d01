"""Bytes that one sync moves over each link, and the seconds that the links' bandwidths allow. Only the seconds are an estimate.

The bytes come from the real reshard plan (`parallel.reshard`). Layers of one kind are equal, so one layer of each kind is planned per stage
and multiplied by its count.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_rl.cost.hardware import LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.cost.weights import count_layer_kinds
from megatron_rl.cost.workload import Candidate, Workload
from parallel.adapters import is_adapter
from parallel.formats import TensorFormat
from parallel.layout_hints import keep_one_layer_per_kind
from parallel.own_transfers import Job, Want, list_all_jobs
from parallel.shards import Rect

Array = NDArray[Any]

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
    model, layout, width = keep_one_layer_per_kind(job.model), candidate.train.one_stage, candidate.train.world_size // candidate.train.pp
    jobs = list_all_jobs(model, layout, candidate.rollout, job.contract.format_of)
    groups = {holders: _group_alike(job, each) for holders, each in jobs.items()}
    sent, received = np.zeros((len(LINKS), candidate.gpus)), np.zeros((len(LINKS), candidate.gpus))
    readers, first = 0, 0
    for stage in range(candidate.train.pp):
        offset = stage * width
        sources, targets, whole, adapters = _list_stage_flows(job, candidate, groups, stage)
        later = adapters if job.trains_adapters else whole
        links = np.where(sources == targets, 0, np.where(sources // cluster.gpus_per_node == targets // cluster.gpus_per_node, 1, 2))
        for load, gpus in ((sent, sources), (received, targets)):
            load += np.bincount(links * candidate.gpus + gpus, weights=later, minlength=load.size).reshape(load.shape)
        opened = np.zeros((width, candidate.gpus), bool)
        opened[sources - offset, targets] = sources != targets
        readers = max(readers, int(opened.sum(axis=1).max()))
        first += int(whole.sum())
    out, into = dict(zip(LINKS, sent, strict=True)), dict(zip(LINKS, received, strict=True))
    rates = {"node": cluster.gpu.nvlink, "network": NETWORK_BANDWIDTH}
    seconds = (sent.sum(axis=0) + received.sum(axis=0)) / (cluster.gpu.hbm / 2)  # at full bandwidths; a transfer reads and writes
    seconds += sum(np.maximum(out[link], into[link]) / rate for link, rate in rates.items())
    busiest = {link: int(max(out[link].max(), into[link].max())) for link in LINKS}
    total = {link: int(into[link].sum()) for link in LINKS}
    return SyncTraffic(total, busiest, float(seconds.max()) / LINK_EFFICIENCY, readers, first)


class _Alike(NamedTuple):
    """Consecutive jobs of one kind of layer with as many bytes for the same engine ranks."""

    part: str
    """Number of the kind of layer, or name of a tensor outside layers."""
    ranks: tuple[int, ...]
    nbytes: tuple[int, ...]
    """Bytes for each of `ranks`, with scales."""
    adapter: bool
    times: int = 1


def _group_alike(job: Workload, jobs: Sequence[Job]) -> list[_Alike]:
    def describe(each: Job) -> _Alike:
        names, format = each.region.tensor.name.removeprefix(job.model.prefix).split("."), job.contract.format_of(each.region.tensor.role)
        sizes = tuple(_count_with_scales(want, rect, format) for want, rect in each.wants)
        ranks = tuple(want.rank for want, _ in each.wants)
        return _Alike(names[1] if names[0] == "layers" else names[0], ranks, sizes, is_adapter(each.shard.name))

    return [alike._replace(times=len(list(same))) for alike, same in itertools.groupby(map(describe, jobs))]


def _count_with_scales(want: Want, rect: Rect, format: TensorFormat) -> int:
    """Return the bytes of a rectangle and of its scales; if whole rows share a scale, the rectangle at their first column brings it."""
    nbytes = rect.rows * rect.cols * format.element_bytes
    if format.block is None or not (format.block[1] or rect.col - want.region.tensor_rect.col + want.region.shard_col == 0):
        return nbytes
    return nbytes + math.prod(format.scale_grid(rect.rows, rect.cols)) * format.scale.element_bytes


def _list_stage_flows(
    job: Workload, candidate: Candidate, groups: Mapping[tuple[int, ...], Sequence[_Alike]], stage: int
) -> tuple[Array, Array, Array, Array]:
    """Return (sending GPU, receiving GPU, bytes of a first sync, bytes of adapters) of what a pipeline stage sends."""
    offset, last = stage * candidate.train.world_size // candidate.train.pp, int(stage == candidate.train.pp - 1)
    layers = {str(layer): count for layer, count in enumerate(count_layer_kinds(job.model, candidate.train, stage))}
    layers |= {"embed_tokens": int(stage == 0), "norm": last, "lm_head": last}
    flows = [(np.zeros(0, int), np.zeros(0, int), np.zeros(0), np.zeros(0))]
    for holders, jobs in groups.items():
        senders, turn = np.array(holders) + offset, 0
        for part, ranks, nbytes, adapter, number in jobs:
            targets = candidate.engine_gpu(0) + np.add.outer(np.arange(candidate.engines) * candidate.rollout_tp, ranks).ravel()
            sizes = np.tile(np.array(nbytes, float) * layers[part], candidate.engines)
            away = ~np.isin(targets, senders)
            others = int(away.sum())
            if layers[part]:
                starts = Counter((turn + each * others) % len(senders) for each in range(number))
                sent = [(senders[(start + np.arange(others)) % len(senders)], away, times) for start, times in starts.items()]
                for sources, chosen, times in (*sent, (targets[~away], ~away, number)):  # those at home, from their own GPU
                    flows.append((sources, targets[chosen], sizes[chosen] * times, sizes[chosen] * (times * adapter)))
            turn += number * others
    return tuple(map(np.concatenate, zip(*flows, strict=True)))  # type: ignore[return-value]
