"""Seconds that a real step's work takes at least, by kind: a rehearsed pass times its micro-batches, at the planner's rates."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.hardware import LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.planner.roofline import COMPUTE_EFFICIENCY
from megatron_rl.rehearsal.recorder import Phase

_HIDDEN = ("dp ", "dp*cp ", "edp ", "pp ")
"""Groups whose exchange within a pass goes on beside computation: gradients' buckets, and messages between stages."""

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

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        times = {"seconds": self.seconds, "total_seconds": self.total, "hidden_seconds": self.hidden}
        return {"passes": self.passes, **times, "elementwise_bytes": self.elementwise}


def estimate_bound(phase: Phase, job: Workload, candidate: Candidate, cluster: Cluster) -> Bound | None:
    """Return the bound of an optimizer step, of a critic's with its values, or of the log-probs of all samples by actor, reference and
    teacher; None for other phases.

    What runs within passes is multiplied by the step's micro-batches over the rehearsed ones; all else happens once. Products take the
    longer of FLOPs / (rate * COMPUTE_EFFICIENCY) and bytes / (HBM * LINK_EFFICIENCY); attention's FLOPs are among the BF16 products'. A
    rank of a group of n sends (n - 1) / n of a tensor, twice of an all-reduce, over NVLink where the group is within a node, else over its
    adapter.
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
    seconds = {kind: count / hbm for kind, count in moved.items()}
    elementwise = sum(count for kind, count in moved.items() if not kind.endswith(_NOT_ELEMENTWISE))
    for dtype, rate in rates.items():
        flops = phase.flops[dtype] + (factor - 1) * phase.flops_in_passes[dtype]
        kind = f"{dtype} products"
        if flops:
            seconds[kind] = max(seconds.get(kind, 0.0), flops / (rate * COMPUTE_EFFICIENCY))
    exposed = hidden = 0.0
    for (group, first, last, within), nbytes in phase.sent.items():
        bandwidth = cluster.gpu.nvlink if cluster.node_of(first) == cluster.node_of(last) else NETWORK_BANDWIDTH
        time = nbytes * (factor if within else 1) / (bandwidth * LINK_EFFICIENCY)
        if within and group.startswith(_HIDDEN):
            hidden += time
        else:
            exposed += time
    seconds["exposed communication"] = exposed
    return Bound(passes, dict(sorted(seconds.items(), key=lambda entry: -entry[1])), hidden, elementwise)
