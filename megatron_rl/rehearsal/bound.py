"""Lower bounds of a real step's phases: seconds by kind of work at the rates of `cost.hardware`, and bytes of element-wise kernels.

A replay of a pass's timeline decides how much exchange is hidden. Kernels run in order. Exchanges over one kind of link run in order, each
after all work that was queued before it. If kernels wait for an exchange, its remaining time is exposed. Not modeled: an exchange also
takes processors and memory bandwidth from the kernels that run beside it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.cost.activations import count_least_bytes_in_pass, count_least_bytes_per_update
from megatron_rl.cost.hardware import Cluster, Gpu
from megatron_rl.cost.workload import Candidate, Workload
from megatron_rl.rehearsal.recorder import Phase, Segment

_REPLICAS = ("dp ", "dp*cp ", "edp ")
"""Groups that exchange once per step within passes: gradients in the last backward pass, weights in the first forward pass."""
_HIDDEN = (*_REPLICAS, "pp ")
"""Groups whose exchange within passes overlaps with computation."""
_NOT_ELEMENTWISE = ("products", "attention", "communication's copies", "sync")


@dataclass(frozen=True)
class Bound:
    """Lower bound of a phase of a real step on one rank."""

    passes: float
    """Forward passes over a micro-batch."""
    seconds: dict[str, float]
    """Seconds by kind of work, and `exposed communication`. Products and attention take the longer of arithmetic and memory."""
    hidden: float
    """Seconds of communication that overlaps with computation."""
    elementwise: float
    """Bytes moved by kernels other than `_NOT_ELEMENTWISE`."""
    kernels: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        times = {"seconds": self.seconds, "total_seconds": self.total, "hidden_seconds": self.hidden}
        return {"passes": self.passes, **times, "elementwise_bytes": self.elementwise, "kernels": self.kernels}


def estimate_bound(phase: Phase, job: Workload, candidate: Candidate, cluster: Cluster) -> Bound | None:
    """Return the bound of an optimizer step (a critic's with its values) or of all log-probs; None for phases without passes.

    Work within passes is multiplied by the step's micro-batches over the rehearsed ones. Other work, and the replicas' exchange, happens
    once.
    """
    if not phase.passes:
        return None
    passes = candidate.micro_batches(job)
    if phase.name.startswith("logprobs"):
        passes *= job.config.algorithm.updates_per_step * job.scoring_passes
    if phase.name.startswith("critic"):  # the phase contains values and the optimizer step
        passes *= 2
    factor = passes * candidate.train.vpp / phase.passes  # every virtual stage has a pass over each micro-batch
    moved: defaultdict[str, float] = defaultdict(float)
    for (kind, _), count in phase.moved.items():
        moved[kind] += count
    for kind, count in phase.moved_in_passes.items():
        moved[kind] += (factor - 1) * count
    flops = {kind: count + (factor - 1) * phase.flops_in_passes[kind] for kind, count in phase.flops.items()}
    seconds = _count_kernel_seconds(moved, flops, cluster.gpu)
    elementwise = sum(count for kind, count in moved.items() if not kind.endswith(_NOT_ELEMENTWISE))
    exposed = sum(factor * waited for waited in _replay(phase.timeline, cluster))
    hidden = -exposed
    for (group, kind, ranks, within), nbytes in phase.sent.items():
        time = cluster.exchange_seconds(kind, ranks, nbytes)
        hidden += (1 if group.startswith(_REPLICAS) else factor) * time if within else 0
        exposed += 0 if within else time
    seconds["exposed communication"] = exposed
    kernels = phase.operators + (factor - 1) * phase.operators_in_passes
    return Bound(passes, dict(sorted(seconds.items(), key=lambda entry: -entry[1])), hidden, elementwise, kernels)


def count_least_bytes(phase: Phase, bound: Bound, job: Workload, candidate: Candidate, stage: int) -> float | None:
    """Return the least bytes that element-wise kernels of a real step's phase can move; None if no formula exists, as for a critic."""
    if phase.name.startswith("critic") or (phase.name.startswith("logprobs") and job.teacher is not None):
        return None
    trains = phase.name.startswith("update")
    in_pass = count_least_bytes_in_pass(job, candidate, stage, trains)
    once = count_least_bytes_per_update(job, candidate, stage) if trains else 0.0
    return None if in_pass is None else bound.passes * in_pass + once


def _count_kernel_seconds(moved: Mapping[str, float], flops: Mapping[str, float], gpu: Gpu) -> dict[str, float]:
    seconds = {kind: gpu.memory_seconds(count) for kind, count in moved.items()}
    for product, count in flops.items():
        if count and product in gpu.rates:
            kind = product if product == "attention" else f"{product} products"
            seconds[kind] = max(seconds.get(kind, 0.0), gpu.product_seconds({product: count}))
    return seconds


def _replay(timeline: Iterable[Segment], cluster: Cluster) -> Iterator[float]:
    """Yield the seconds of each wait of kernels for an exchange, except in `_HIDDEN` groups."""
    now = 0.0
    free: defaultdict[float, float] = defaultdict(float)
    ends: dict[int, float] = {}
    for segment in timeline:
        now += sum(_count_kernel_seconds(segment.moved, segment.flops, cluster.gpu).values())
        if segment.sent is None:
            end = ends.pop(segment.exchange, now)
            yield max(0.0, end - now)
            now = max(now, end)
        elif not segment.sent[0].startswith(_HIDDEN):
            _, kind, ranks, nbytes = segment.sent
            link = cluster.link_bandwidth(min(ranks), max(ranks))
            free[link] = ends[segment.exchange] = max(now, free[link]) + cluster.exchange_seconds(kind, ranks, nbytes)
    yield max([0.0, *(end - now for end in ends.values())])
