"""Search over placements of a run on a cluster: drops those that do not work or do not fit, and ranks the rest by seconds per step.

Colocated candidates use all GPUs for both sides; disaggregated ones give an eighth, a quarter, half or three quarters of them to engines.
Tensor parallel sizes stay within a node. Pipeline (with one, two or four virtual stages), expert and data parallel sizes are all that
divide the remaining GPUs. The first and last stage get fewer layers if that balances the stages. Context parallelism is tried if a sequence
is longer than a micro-batch, full recomputation if nothing else fits, and engines over several nodes if no engine of one node fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import track

from megatron_rl.cost.hardware import Cluster
from megatron_rl.cost.workload import Candidate, Placement, Recompute, Workload
from megatron_rl.planner.memory_by_phase import (
    PhaseMemory,
    add_ipc_contexts,
    estimate_phase_memory,
    list_engine_parts,
    list_phases,
    list_trainer_parts,
    usable_bytes,
)
from megatron_rl.planner.roofline import StepTime, estimate_generation, estimate_step_time, estimate_trainer, weigh_output_layer
from megatron_rl.planner.sync_traffic import SyncTraffic, estimate_sync_traffic
from megatron_rl.preflight import LAYOUTS, PLAN, Needs, find_mistakes
from parallel.layout import EngineLayout, Layout, balance_stages, check_stages
from parallel.layout_hints import list_divisors
from parallel.shards import GeometryError

T = TypeVar("T")

_ENGINE_EIGHTHS = (1, 2, 4, 6)


@dataclass(frozen=True)
class CandidateEstimate:
    """A candidate with its memory, its seconds per step and, once estimated, its sync traffic."""

    candidate: Candidate
    memory: tuple[PhaseMemory, ...]
    spare: float
    """Bytes left on the fullest GPU; negative if the candidate does not fit."""
    seconds: StepTime
    sync: SyncTraffic | None = None

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def step(self) -> float:
        return self.seconds.step

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        phases = ("generate", "logprobs", *(["critic"] if self.seconds.critic else []), "train", "sync")
        return {phase: getattr(self.seconds, phase) for phase in phases}

    @property
    def fullest(self) -> PhaseMemory:
        return max(self.memory, key=lambda gpu: gpu.total)


class _Rating(NamedTuple):
    """A candidate with its seconds per step without the sync, and the phase in which the fullest GPU has `spare` bytes left."""

    candidate: Candidate
    recompute: Recompute
    spare: float
    step: float
    phase: str


@dataclass(frozen=True)
class SearchResult:
    ranked: list[CandidateEstimate]
    """The fastest candidates that fit, best first."""
    tried: int
    dropped: Counter[str]
    """Number of rejected candidates by reason."""
    closest: CandidateEstimate | None
    """The candidate that lacks the least memory, among those that the rules of `train` accept."""
    refused: CandidateEstimate | None
    """The fastest candidate that fits, or else the one that lacks the least memory, among those that these rules refuse."""


class Planner:
    """Estimates candidates of one workload on one cluster. Layouts that shard the model in the same way are validated once."""

    def __init__(self, job: Workload, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self._refused: dict[tuple[int, ...], bool] = {}
        self._problems: dict[tuple[Placement, int, EngineLayout], bool] = {}
        self._rate_trainer, self._rate_engine = cache(self._estimate_trainer), cache(self._estimate_engine)

    def estimate(self, candidate: Candidate) -> CandidateEstimate:
        """Return memory and seconds without the sync. Raise GeometryError if a layout does not divide the model."""
        if self.job.teacher is not None:
            check_stages(self.job.teacher.model.layers, candidate.train)
        memory = tuple(estimate_phase_memory(self.job, candidate))
        return CandidateEstimate(candidate, memory, self._count_spare(memory), estimate_step_time(self.job, candidate, self.cluster))

    def _count_spare(self, memory: tuple[PhaseMemory, ...]) -> float:
        return usable_bytes(self.cluster) - max(gpu.total for gpu in memory)

    def with_sync(self, estimate: CandidateEstimate) -> CandidateEstimate:
        """Add the sync's traffic and seconds, and the memory of CUDA IPC."""
        traffic, memory = estimate_sync_traffic(self.job, estimate.candidate, self.cluster), estimate.memory
        if self.job.config.sync.transport == "cuda_ipc":
            memory = add_ipc_contexts(memory, traffic.readers)
        seconds = replace(estimate.seconds, sync=traffic.seconds)
        return replace(estimate, memory=memory, spare=self._count_spare(memory), sync=traffic, seconds=seconds)

    def search(self, count: int) -> SearchResult:
        """Return the `count` fastest candidates, one per training layout, with its best engines. Those that no batch script starts come
        last.

        Trainers and engines are rated apart, and each pair by these ratings. Only the best pairs get an estimate of the sync, because it
        takes a second and a step takes minutes.
        """
        tried, dropped = 0, Counter[str]()
        fitting: dict[tuple[Layout, Placement], _Rating] = {}
        closest: _Rating | None = None
        refused: _Rating | None = None
        for nodes in _powers(self.cluster.nodes):
            for candidate in _track(list(self._candidates(nodes))):
                tried += 1
                try:
                    rating = self._rate_smallest(candidate)
                except GeometryError:
                    dropped["do not divide the model"] += 1
                    continue
                if self.refuses(candidate):
                    dropped["are refused by the rules of `train`"] += 1
                    refused = min(rating, refused or rating, key=_closeness)
                elif rating.spare < 0:
                    dropped[f"are too large in phase {rating.phase}"] += 1
                    closest = min(rating, closest or rating, key=_closeness)
                else:
                    key = candidate.train, candidate.placement
                    fitting[key] = min(rating, fitting.get(key, rating), key=self._rank_key)
            if fitting:
                break
        best = [self._estimate_rated(rating) for rating in sorted(fitting.values(), key=self._rank_key)[:count]]
        fastest = sorted(map(self.with_sync, _track(best)), key=self._rank_key)
        roomiest = max(fastest, key=lambda estimate: estimate.spare, default=closest and self._estimate_rated(closest))
        unfit = refused and self._estimate_rated(refused)
        return SearchResult([estimate for estimate in fastest if estimate.fits], tried, dropped, roomiest, unfit)

    def fits_apart(self, refused: bool = False) -> bool:
        """Return whether some disaggregated candidate fits, with `refused` even if the rules of `train` refuse it. The two sides are tried
        separately, which is faster than `search`."""

        def any_fits(candidates: Iterator[Candidate], gpus: str) -> bool:
            return any((refused or not self.refuses(each)) and self._count_lacking(each, gpus) <= 0 for each in candidates)

        for engine_gpus in self._shares_apart():
            sizes = (each for nodes in _powers(self.cluster.nodes) for each in self._rollouts(engine_gpus, nodes))
            engines = (Candidate(Layout(), *each, "disaggregated") for each in sizes)
            trainers = (Candidate(layout, placement="disaggregated") for layout in self._layouts(self.cluster.gpus - engine_gpus))
            if any_fits(engines, "engine") and any_fits(trainers, "trainer"):
                return True
        return False

    def _count_lacking(self, candidate: Candidate, gpus: str) -> float:
        """Return the bytes that one side's fullest GPU lacks."""
        try:
            memory = estimate_phase_memory(self.job, replace(candidate, recompute="full"))
        except GeometryError:
            return math.inf
        return max(gpu.total for gpu in memory if gpu.gpus == gpus) - usable_bytes(self.cluster)

    def _rate_smallest(self, candidate: Candidate) -> _Rating:
        """Return the rating of the candidate, with full recomputation if it does not fit otherwise."""
        rating = self._rate(candidate, "none")
        return rating if rating.spare >= 0 else self._rate(candidate, "full")

    def _rate(self, candidate: Candidate, recompute: Recompute) -> _Rating:
        """Return what `estimate` would with this recomputation, without the parts of the memory. Raise GeometryError as it does."""
        seconds, held = self._rate_trainer(candidate.train, candidate.placement, recompute)
        generate, held_by_engine = self._rate_engine(candidate.placement, candidate.rollout)
        if candidate.colocated:
            totals = [a + b for a, b in zip(held, held_by_engine, strict=True)]
        else:
            totals = list(map(max, held, held_by_engine))
        fullest = max(totals)
        step = StepTime(generate, 0, seconds, colocated=candidate.colocated).step
        phase = list_phases(self.job)[totals.index(fullest)]
        return _Rating(candidate, recompute, usable_bytes(self.cluster) - fullest, step, phase)

    def _estimate_rated(self, rating: _Rating) -> CandidateEstimate:
        return self.estimate(replace(rating.candidate, recompute=rating.recompute))

    def _estimate_trainer(self, layout: Layout, placement: Placement, recompute: Recompute) -> tuple[float, list[float]]:
        """Return the trainer's seconds, and the bytes on its fullest GPU by phase."""
        if self.job.teacher is not None:
            check_stages(self.job.teacher.model.layers, layout)
        candidate = Candidate(layout, placement=placement, recompute=recompute)
        totals = [sum(parts.values()) for parts in list_trainer_parts(self.job, candidate)]
        return estimate_trainer(self.job, candidate, self.cluster).trainer, totals

    def _estimate_engine(self, placement: Placement, rollout: Any) -> tuple[float, list[float]]:
        """Return the seconds of generation, and the bytes on an engine's GPU by phase."""
        candidate = Candidate(Layout(), rollout.tp, rollout.ep, rollout.engines, placement, nodes_per_engine=rollout.nodes)
        totals = [sum(parts.values()) for parts in list_engine_parts(self.job, candidate)]
        return estimate_generation(self.job, candidate, self.cluster), totals

    def _rank_key(self, found: CandidateEstimate | _Rating) -> tuple[bool, float, float]:
        """Sort by whether a batch script starts the candidate, then by seconds per step, then by free memory."""
        sizes = found.candidate.placement, found.candidate.train.world_size, found.candidate.rollout
        if sizes not in self._problems:
            self._problems[sizes] = bool(found.candidate.find_launch_problem(self.job, self.cluster))
        return self._problems[sizes], found.step, -found.spare

    def refuses(self, candidate: Candidate) -> bool:
        """Return whether the rules of `train` refuse the layouts. Each side is checked beside one rank of the other."""
        layout = candidate.train
        trainer, engine = (layout.tp, layout.cp, layout.ep, layout.etp), (candidate.rollout_tp, candidate.rollout_ep)
        if trainer not in self._refused:
            self._refused[trainer] = self._breaks_rules(candidate.trainer_only, Needs.LAYOUT)
        if engine not in self._refused:
            self._refused[engine] = self._breaks_rules(replace(candidate, train=Layout()), Needs.ENGINE)
        return self._refused[trainer] or self._refused[engine]

    def _breaks_rules(self, candidate: Candidate, about: Needs) -> bool:
        return any(find_mistakes(candidate.facts(self.job, self.cluster), PLAN | LAYOUTS, about))

    def _candidates(self, nodes_per_engine: int) -> Iterator[Candidate]:
        total = self.cluster.gpus
        shares: list[tuple[Placement, int, int]] = [("colocated", total, total)]
        shares += [("disaggregated", total - engine_gpus, engine_gpus) for engine_gpus in self._shares_apart()]
        for placement, trainer_gpus, engine_gpus in shares:
            layouts = list(self._layouts(trainer_gpus))
            for rollout in self._rollouts(engine_gpus, nodes_per_engine):
                for layout in layouts:
                    yield Candidate(layout, *rollout, placement, nodes_per_engine=nodes_per_engine)

    def _shares_apart(self) -> list[int]:
        """Return the numbers of GPUs that engines get in disaggregated candidates."""
        return sorted({self.cluster.gpus * eighths // 8 for eighths in _ENGINE_EIGHTHS} - {0})

    def _rollouts(self, gpus: int, nodes_per_engine: int) -> Iterator[tuple[int, int, int]]:
        """Yield (tp, ep, engines) that use these GPUs, with engines on one node or on all GPUs of several nodes."""
        node = self.cluster.gpus_per_node
        sizes = [tp for tp in _powers(node) if node % tp == 0] if nodes_per_engine == 1 else [node * nodes_per_engine]
        for tp in sizes:
            if gpus and gpus % tp == 0:
                yield tp, 1, gpus // tp
                if self.job.model.experts is not None and tp > 1:
                    yield tp, tp, gpus // tp

    def _layouts(self, gpus: int) -> Iterator[Layout]:
        model = self.job.model
        for tp in _powers(min(gpus, self.cluster.gpus_per_node)):
            for pp in list_divisors(gpus // tp):
                for cp in self._context_sizes(gpus):
                    if gpus % (tp * pp * cp) == 0 and (cp == 1 or model.shares_heads(tp * cp)):
                        for layout in self._expert_layouts(Layout(tp=tp, pp=pp, cp=cp, dp=gpus // (tp * pp * cp))):
                            yield from self._interleaved(layout)

    def _context_sizes(self, gpus: int) -> list[int]:
        """Return context parallel sizes. Sizes above 1 only help if one sequence is longer than a micro-batch."""
        needed = self.job.config.longest_sequence / self.job.config.train.micro_batch_tokens
        return [cp for cp in _powers(gpus) if cp < 2 * needed] if needed > 1 else [1]

    def _expert_layouts(self, layout: Layout) -> Iterator[Layout]:
        experts = self.job.model.experts
        if experts is None:
            yield layout
            return
        for ep in list_divisors(experts.count):
            for etp in sorted({1, layout.tp}):
                if layout.tp * layout.cp * layout.dp % (ep * etp) == 0:
                    yield replace(layout, ep=ep, etp=etp)

    def _interleaved(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layout with one, two and four virtual stages, which trade activation memory for a smaller bubble, with balanced
        stages."""
        output_layer = weigh_output_layer(self.job, layout, self.cluster) if layout.pp > 1 else 0.0
        for vpp in (1, 2, 4) if layout.pp > 1 else (1,):
            if (balanced := balance_stages(self.job.model.layers, layout.pp, vpp, output_layer)) is not None:
                yield replace(layout, vpp=vpp, first_stage_layers=balanced[0], last_stage_layers=balanced[1])


def _closeness(rating: _Rating) -> tuple[float, float]:
    """Sort by missing memory, then by seconds per step."""
    return max(0.0, -rating.spare), rating.step


def _track(items: Sequence[T]) -> Iterable[T]:
    """Yield the items, with a progress bar on a terminal."""
    console = Console(stderr=True)
    return track(items, "Searching", console=console, transient=True, disable=not console.file.isatty())


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length())]
