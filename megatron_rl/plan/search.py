"""Tries every sensible placement of a run on a cluster, drops what cannot work or does not fit, and ranks the rest by seconds per step.

Tried are, colocated, all GPUs for both sides, and, disaggregated, an eighth, a quarter, half or three quarters of them for engines;
tensor parallel sizes within a node; every pipeline, expert and data parallel size that the rest allows. What the configuration has no
field for yet is not tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_rl.errors import UserError
from megatron_rl.plan import alignment
from megatron_rl.plan.candidate import Candidate, Job, Placement
from megatron_rl.plan.hardware import Cluster
from megatron_rl.plan.phases import Side, phases, spare
from megatron_rl.plan.sync_load import SyncLoad, sync_load
from megatron_rl.plan.timing import Seconds, seconds
from parallel.layout import Layout

_SYNCED = 12
"""Candidates whose sync is planned as well: the fastest without it."""
_ENGINE_EIGHTHS = (1, 2, 4, 6)


@dataclass(frozen=True)
class Verdict:
    """A candidate that works, with what it needs and takes."""

    candidate: Candidate
    memory: tuple[Side, ...]
    spare: float
    """Bytes left on the fullest GPU; negative where it does not fit."""
    seconds: Seconds
    sync: SyncLoad | None = None

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def fullest(self) -> Side:
        return max(self.memory, key=lambda side: side.total)


@dataclass(frozen=True)
class Found:
    """`ranked`: the fastest that fit, best first. `dropped`: how many of `tried` were left out, by reason. `closest`: of those that are
    only too large, the one that lacks least."""

    ranked: list[Verdict]
    tried: int
    dropped: Counter[str]
    closest: Verdict | None


class Planner:
    """Judges candidates of one job on one cluster; what several have in common is computed once."""

    def __init__(self, job: Job, cluster: Cluster, sharded_optimizer: bool = False, recompute: bool = False) -> None:
        self.job, self.cluster = job, cluster
        self._sharded, self._recompute = sharded_optimizer, recompute
        self._problems: dict[tuple[int, ...], UserError | None] = {}

    def judge(self, candidate: Candidate) -> Verdict:
        """Memory and seconds, the sync's left out. The layouts must be without `problem`."""
        sides = phases(self.job, candidate)
        return Verdict(candidate, tuple(sides), spare(sides, self.cluster), seconds(self.job, candidate, self.cluster))

    def with_sync(self, verdict: Verdict) -> Verdict:
        load = sync_load(self.job, verdict.candidate, self.cluster)
        return replace(verdict, sync=load, seconds=replace(verdict.seconds, sync=load.seconds))

    def problem(self, candidate: Candidate) -> UserError | None:
        """See `alignment.problem`; asked once for layouts that cut alike."""
        layout = candidate.train
        key = (layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, candidate.rollout_tp, candidate.rollout_ep)
        if key not in self._problems:
            self._problems[key] = alignment.problem(self.job, candidate)
        return self._problems[key]

    def search(self, placements: tuple[Placement, ...], count: int) -> Found:
        """The `count` fastest, each training layout once, with its best engines."""
        tried, dropped = 0, Counter[str]()
        fitting: dict[tuple[Layout, Placement], Verdict] = {}
        closest: Verdict | None = None
        for candidate in self._candidates(placements):
            tried += 1
            if self._problem_apart(candidate):
                dropped["cut FP8 blocks, or do not divide the model"] += 1
                continue
            verdict = self.judge(candidate)
            if verdict.fits:
                key = candidate.train, candidate.placement
                fitting[key] = min(verdict, fitting.get(key, verdict), key=_order)
                continue
            dropped[f"are too large in phase {verdict.fullest.phase}"] += 1
            if closest is None or verdict.spare > closest.spare:
                closest = verdict
        fastest = sorted(fitting.values(), key=_order)[:_SYNCED]
        return Found(sorted(map(self.with_sync, fastest), key=_order)[:count], tried, dropped, closest)

    def _problem_apart(self, candidate: Candidate) -> bool:
        """`problem`, asked of trainer and engine apart: there are far fewer of either than pairs."""
        trainer = replace(candidate, rollout_tp=1, rollout_ep=1)
        engine = replace(candidate, train=Layout())
        return self.problem(trainer) is not None or self.problem(engine) is not None

    def _candidates(self, placements: tuple[Placement, ...]) -> Iterator[Candidate]:
        total = self.cluster.gpus
        for placement in placements:
            shares = {total} if placement == "colocated" else {total * eighths // 8 for eighths in _ENGINE_EIGHTHS}
            for engine_gpus in sorted(shares):
                trainer_gpus = total if placement == "colocated" else total - engine_gpus
                for rollout in self._rollouts(engine_gpus):
                    for layout in self._layouts(trainer_gpus):
                        yield Candidate(layout, *rollout, placement, self._sharded, self._recompute)

    def _rollouts(self, gpus: int) -> Iterator[tuple[int, int, int]]:
        """(tp, ep, engines) that use these GPUs, no engine over two nodes."""
        for tp in _powers(min(gpus, self.cluster.gpus_per_node)):
            if gpus and gpus % tp == 0 and self.cluster.gpus_per_node % tp == 0:
                yield tp, 1, gpus // tp
                if self.job.model.experts is not None and tp > 1:
                    yield tp, tp, gpus // tp

    def _layouts(self, gpus: int) -> Iterator[Layout]:
        experts = self.job.model.experts
        for tp in _powers(min(gpus, self.cluster.gpus_per_node)):
            for pp in _divisors(self.job.model.layers):
                if gpus % (tp * pp):
                    continue
                dp = gpus // (tp * pp)
                eps = _divisors(experts.count) if experts else [1]
                for ep in eps:
                    for etp in {1, tp} if experts else {tp}:
                        if (tp * dp) % (ep * etp) == 0:
                            yield Layout(tp=tp, pp=pp, ep=ep, etp=etp, dp=dp)


def _order(verdict: Verdict) -> tuple[float, float]:
    return verdict.seconds.step, -verdict.spare


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _divisors(length: int) -> list[int]:
    return [size for size in range(1, length + 1) if length % size == 0]
