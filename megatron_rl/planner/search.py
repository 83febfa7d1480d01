"""Tries every sensible placement of a run on a cluster, drops what cannot work or does not fit, and ranks the rest by seconds per step.

Tried are, colocated, all GPUs for both sides, and, disaggregated, an eighth, a quarter, half or three quarters of them for engines;
tensor parallel sizes within a node; every pipeline, expert and data parallel size that the rest allows. Where the configuration has
fields for them: two and four virtual stages; context parallelism, where a sequence is longer than a micro-batch; recomputation, where
nothing else fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_rl.planner import block_alignment
from megatron_rl.planner.candidate import Candidate, Placement, Workload, has_field
from megatron_rl.planner.hardware import GIB, Cluster
from megatron_rl.planner.memory_by_phase import PhaseMemory, estimate_phase_memory, spare_bytes
from megatron_rl.planner.roofline import StepTime, estimate_step_time
from megatron_rl.planner.sync_traffic import SyncTraffic, estimate_sync_traffic
from parallel.layout import Layout
from parallel.shards import GeometryError

_ENGINE_EIGHTHS = (1, 2, 4, 6)


@dataclass(frozen=True)
class CandidateEstimate:
    """A candidate that works, with what it needs and takes."""

    candidate: Candidate
    memory: tuple[PhaseMemory, ...]
    spare: float
    """Bytes left on the fullest GPU; negative where it does not fit."""
    seconds: StepTime
    sync: SyncTraffic | None = None

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of a step by phase."""
        found = self.seconds
        return {"generate": found.generate, "logprobs": found.logprobs, "train": found.train, "sync": found.sync}

    @property
    def fullest(self) -> PhaseMemory:
        return max(self.memory, key=lambda side: side.total)


@dataclass(frozen=True)
class SearchResult:
    """`ranked`: the fastest that fit, best first. `dropped`: how many of `tried` were left out, by reason. `closest`: of those that are
    only too large, the one that lacks least."""

    ranked: list[CandidateEstimate]
    tried: int
    dropped: Counter[str]
    closest: CandidateEstimate | None


class Planner:
    """Judges candidates of one job on one cluster; layouts that cut alike are checked once."""

    def __init__(self, job: Workload, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self._layout_errors: dict[tuple[int, ...], bool] = {}

    def estimate(self, candidate: Candidate) -> CandidateEstimate:
        """Memory and seconds, the sync's left out. Raises GeometryError where a layout does not divide the model."""
        sides = estimate_phase_memory(self.job, candidate)
        return CandidateEstimate(
            candidate, tuple(sides), spare_bytes(sides, self.cluster), estimate_step_time(self.job, candidate, self.cluster)
        )

    def with_sync(self, verdict: CandidateEstimate) -> CandidateEstimate:
        load = estimate_sync_traffic(self.job, verdict.candidate, self.cluster)
        return replace(verdict, sync=load, seconds=replace(verdict.seconds, sync=load.seconds))

    def search(self, placements: tuple[Placement, ...], count: int) -> SearchResult:
        """The `count` fastest, each training layout once, with its best engines. The sync, a second beside minutes, is planned for those
        alone."""
        tried, dropped = 0, Counter[str]()
        fitting: dict[tuple[Layout, Placement], CandidateEstimate] = {}
        closest: CandidateEstimate | None = None
        for candidate in self._candidates(placements):
            tried += 1
            try:
                verdict = self._estimate_with_recompute(candidate)
            except GeometryError:
                dropped["do not divide the model"] += 1
                continue
            if not verdict.fits:
                dropped[f"are too large in phase {verdict.fullest.phase}"] += 1
                if (closest is None or verdict.spare > closest.spare) and not self._has_layout_error(candidate):
                    closest = verdict
            elif self._has_layout_error(candidate):
                dropped["cut FP8 blocks"] += 1
            else:
                key = candidate.train, candidate.placement
                fitting[key] = min(verdict, fitting.get(key, verdict), key=_order)
        fastest = sorted(fitting.values(), key=_order)[:count]
        return SearchResult(sorted(map(self.with_sync, fastest), key=_order), tried, dropped, closest)

    def _estimate_with_recompute(self, candidate: Candidate) -> CandidateEstimate:
        """`estimate`, with activations recomputed where it does not fit otherwise."""
        verdict = self.estimate(candidate)
        if verdict.fits or not has_field("train.recompute"):
            return verdict
        return self.estimate(replace(candidate, recompute="full"))

    def _has_layout_error(self, candidate: Candidate) -> bool:
        layout, rollout = candidate.train, (candidate.rollout_tp, candidate.rollout_ep)
        trainer, engine = (layout.tp, layout.ep, layout.etp), rollout
        if trainer not in self._layout_errors:
            self._layout_errors[trainer] = block_alignment.validate_trainer_layout(self.job, layout) is not None
        if engine not in self._layout_errors:
            self._layout_errors[engine] = block_alignment.validate_engine_layout(self.job, *rollout) is not None
        return self._layout_errors[trainer] or self._layout_errors[engine]

    def _candidates(self, placements: tuple[Placement, ...]) -> Iterator[Candidate]:
        total = self.cluster.gpus
        for placement in placements:
            shares = {total} if placement == "colocated" else {total * eighths // 8 for eighths in _ENGINE_EIGHTHS}
            for engine_gpus in sorted(shares):
                trainer_gpus = total if placement == "colocated" else total - engine_gpus
                for rollout in self._rollouts(engine_gpus):
                    for layout in self._layouts(trainer_gpus):
                        yield Candidate(layout, *rollout, placement)

    def _rollouts(self, gpus: int) -> Iterator[tuple[int, int, int]]:
        """(tp, ep, engines) that use these GPUs, no engine over two nodes."""
        for tp in _powers(min(gpus, self.cluster.gpus_per_node)):
            if gpus and gpus % tp == 0 and self.cluster.gpus_per_node % tp == 0:
                yield tp, 1, gpus // tp
                if self.job.model.experts is not None and tp > 1:
                    yield tp, tp, gpus // tp

    def _layouts(self, gpus: int) -> Iterator[Layout]:
        model = self.job.model
        for tp in _powers(min(gpus, self.cluster.gpus_per_node)):
            for pp in _divisors(model.layers):
                for cp in self._context_sizes(gpus):
                    if gpus % (tp * pp * cp) == 0 and (cp == 1 or model.heads % (tp * cp) == 0):
                        for layout in self._expert_layouts(Layout(tp=tp, pp=pp, cp=cp, dp=gpus // (tp * pp * cp))):
                            yield from self._interleaved(layout)

    def _context_sizes(self, gpus: int) -> list[int]:
        """Above 1 where one sequence is longer than a micro-batch: elsewhere it only adds traffic."""
        needed = self.job.max_sequence / self.job.config.train.micro_batch_tokens
        if needed <= 1 or not has_field("train.layout.cp"):
            return [1]
        return [cp for cp in _powers(gpus) if cp < 2 * needed]

    def _expert_layouts(self, layout: Layout) -> Iterator[Layout]:
        experts = self.job.model.experts
        if experts is None:
            yield layout
            return
        for ep in _divisors(experts.count):
            for etp in sorted({1, layout.tp}):
                if layout.tp * layout.cp * layout.dp % (ep * etp) == 0:
                    yield replace(layout, ep=ep, etp=etp)

    def _interleaved(self, layout: Layout) -> Iterator[Layout]:
        """With one, two and four virtual stages: a smaller bubble for more activations."""
        per_stage = self.job.model.layers // layout.pp
        for vpp in (1, 2, 4) if layout.pp > 1 and has_field("train.layout.vpp") else (1,):
            if per_stage % vpp == 0:
                yield replace(layout, vpp=vpp)


def _order(verdict: CandidateEstimate) -> tuple[float, float]:
    return verdict.seconds.step, -verdict.spare


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _divisors(length: int) -> list[int]:
    return [size for size in range(1, length + 1) if length % size == 0]


def explain_rank(verdict: CandidateEstimate, best: CandidateEstimate) -> str:
    """Why a candidate stands where it does: what its seconds go to, or where it loses against the best and what it gains."""
    seconds = verdict.seconds
    if verdict is best:
        phase, longest = max(verdict.seconds_by_phase.items(), key=lambda item: item[1])
        return f"the fastest that fits; {longest / sum(verdict.seconds_by_phase.values()):.0%} of its work is {phase}"
    told = []
    if verdict.candidate.placement != best.candidate.placement:
        how = "one after the other" if verdict.candidate.colocated else "side by side"
        told.append(f"{seconds.generate:.3g} s of generation and {seconds.trainer:.3g} s of training, {how}")
    else:
        apart = {phase: mine - best.seconds_by_phase[phase] for phase, mine in verdict.seconds_by_phase.items()}
        largest = sorted(apart.items(), key=lambda item: -abs(item[1]))[:2]
        told += [f"{phase} {change:+.3g} s" for phase, change in largest if abs(change) > 0.05]
    if seconds.bubble - best.seconds.bubble > 0.01:
        told.append(f"the pipeline waits {seconds.bubble:.0%} of its time")
    spared = (verdict.spare - best.spare) / GIB
    if abs(spared) >= 1:
        told.append(f"{abs(spared):.0f} GiB {'more' if spared > 0 else 'less'} free")
    return f"{seconds.step / best.seconds.step - 1:+.1%}: {', '.join(told) or 'as good as the best'}"
