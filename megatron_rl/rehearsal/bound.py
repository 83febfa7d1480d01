"""Seconds that a real step's work takes at least, by kind: a rehearsed pass times its micro-batches, at the planner's rates.

Which exchange within passes is hidden follows from their timeline: kernels run one after the other; so does exchange over one kind of link,
each once all is done that was queued before it; where kernels wait for an exchange, what is left of it is exposed. Not counted: an exchange
takes some of the GPU's processors, and of its memory's bandwidth, from the kernels beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.hardware import LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.planner.roofline import COMPUTE_EFFICIENCY
from megatron_rl.rehearsal.recorder import Phase, Stretch

_REPLICAS = ("dp ", "dp*cp ", "edp ")
"""Groups whose exchange within a pass happens once a step: gradients in its last backward pass, weights in the first pass after it."""
_HIDDEN = (*_REPLICAS, "pp ")
"""Groups whose exchange within a pass goes on beside computation: those, and messages between stages."""

_NOT_ELEMENTWISE = ("products", "attention", "communication's copies", "sync")
"""Kinds of bytes."""


@dataclass(frozen=True)
class Bound:
    """A phase of a real step on one rank."""

    passes: float
    """Forward passes over a micro-batch."""
    seconds: dict[str, float]
    """By kind, those that nothing hides: `products` and attention by dtype as the longer of arithmetic and memory, others by memory, and
    `exposed communication`."""
    hidden: float
    """Seconds of communication beside computation."""
    elementwise: float
    """Bytes that kernels move which are no products, attention, or copies for communication and syncs."""
    kernels: float
    """That the host launches."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        times = {"seconds": self.seconds, "total_seconds": self.total, "hidden_seconds": self.hidden}
        return {"passes": self.passes, **times, "elementwise_bytes": self.elementwise, "kernels": self.kernels}


def estimate_bound(phase: Phase, job: Workload, candidate: Candidate, cluster: Cluster) -> Bound | None:
    """Return the bound of an optimizer step, of a critic's with its values, or of the log-probs of all samples by actor, reference and
    teacher; None for other phases.

    What runs within passes is multiplied by the step's micro-batches over the rehearsed ones; all else, and what replicas exchange, happens
    once. Products take the longer of FLOPs / (rate * COMPUTE_EFFICIENCY) and bytes / (HBM * LINK_EFFICIENCY); attention's FLOPs are among
    the BF16 products'. A rank of a group of n sends (n - 1) / n of a tensor, twice of an all-reduce, over NVLink where the group is within
    a node, else over its adapter.
    """
    if not phase.passes:
        return None
    passes = candidate.micro_batches(job)
    if phase.name.startswith("logprobs"):
        passes *= job.config.algorithm.updates_per_step * job.scoring_passes
    if phase.name.startswith("critic"):  # values, then the optimizer step: both rehearsed
        passes *= 2
    factor = passes * candidate.train.vpp / phase.passes  # of a micro-batch every virtual stage has one
    hbm, rates = cluster.gpu.hbm * LINK_EFFICIENCY, {"fp8": cluster.gpu.fp8, "bf16": cluster.gpu.bf16, "fp32": cluster.gpu.bf16 / 2}
    moved: defaultdict[str, float] = defaultdict(float)
    for (kind, _), count in phase.moved.items():
        moved[kind] += count
    for kind, count in phase.moved_in_passes.items():
        moved[kind] += (factor - 1) * count
    flops = {dtype: phase.flops[dtype] + (factor - 1) * phase.flops_in_passes[dtype] for dtype in rates}
    seconds = _count_kernel_seconds(moved, flops, hbm, rates)
    elementwise = sum(count for kind, count in moved.items() if not kind.endswith(_NOT_ELEMENTWISE))
    exposed = sum(factor * waited for waited in _replay(phase.timeline, cluster, hbm, rates))
    hidden = -exposed
    for (group, first, last, within), nbytes in phase.sent.items():
        time = nbytes / _bandwidth(cluster, first, last)
        hidden += (1 if group.startswith(_REPLICAS) else factor) * time if within else 0
        exposed += 0 if within else time
    seconds["exposed communication"] = exposed
    kernels = phase.operators + (factor - 1) * phase.operators_in_passes
    return Bound(passes, dict(sorted(seconds.items(), key=lambda entry: -entry[1])), hidden, elementwise, kernels)


_Counts = Mapping[str, float]


def _count_kernel_seconds(moved: _Counts, flops: _Counts, hbm: float, rates: _Counts) -> dict[str, float]:
    """Return the seconds of kernels by kind: of bytes by kind and FLOPs by dtype."""
    seconds = {kind: count / hbm for kind, count in moved.items()}
    for dtype, rate in rates.items():
        if flops.get(dtype):
            kind = f"{dtype} products"
            seconds[kind] = max(seconds.get(kind, 0.0), flops[dtype] / (rate * COMPUTE_EFFICIENCY))
    return seconds


def _bandwidth(cluster: Cluster, first: int, last: int) -> float:
    """Return the bytes per second that a rank sends within a group from a first to a last rank."""
    within_node = cluster.node_of(first) == cluster.node_of(last)
    return (cluster.gpu.nvlink if within_node else NETWORK_BANDWIDTH) * LINK_EFFICIENCY


def _replay(timeline: Iterable[Stretch], cluster: Cluster, hbm: float, rates: _Counts) -> Iterator[float]:
    """Yield the seconds of each wait of kernels for an exchange. Exchange of `_HIDDEN` groups is left out."""
    now = 0.0
    free: defaultdict[float, float] = defaultdict(float)
    ends: dict[int, float] = {}
    for stretch in timeline:
        now += sum(_count_kernel_seconds(stretch.moved, stretch.flops, hbm, rates).values())
        if stretch.sent is None:
            end = ends.pop(stretch.exchange, now)
            yield max(0.0, end - now)
            now = max(now, end)
        elif not stretch.sent[0].startswith(_HIDDEN):
            _, first, last, nbytes = stretch.sent
            link = _bandwidth(cluster, first, last)
            free[link] = ends[stretch.exchange] = max(now, free[link]) + nbytes / link
    yield max([0.0, *(end - now for end in ends.values())])
