"""The dry run of a configuration on a cluster: what `megatron-rl plan` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.planner import block_alignment
from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.hardware import GIB, Cluster
from megatron_rl.planner.memory_by_phase import count_offloaded_bytes, count_sample_bytes, usable_bytes
from megatron_rl.planner.roofline import compare_reductions
from megatron_rl.planner.search import CandidateEstimate, Planner, SearchResult, explain_rank
from megatron_rl.preflight import LAYOUTS, PLAN, check


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line."""

    path: Path
    """The configuration's file."""
    overrides: tuple[str, ...]
    nodes: int | None
    """None: as many as the configured layout needs."""
    gpus_per_node: int
    gpu: str
    top: int
    """Layouts to show."""
    json: Path | None
    sbatch: Path | None


@dataclass(frozen=True)
class Plan:
    """A plan. `chosen` is the configured layout where one is configured and works, else the best."""

    job: Workload
    cluster: Cluster
    chosen: CandidateEstimate
    refusal: UserError | None
    """Why the configured layout does not work."""
    search: SearchResult

    @property
    def configured(self) -> bool:
        """Whether `chosen` is the configured layout."""
        return self.refusal is None and _is_configured(self.job.config)


def make_plan(config: Config, options: PlanOptions) -> Plan:
    """Plan the run from config.json alone: no process, no torch, no weights. Raise UserError where nothing works."""
    job = Workload.from_config(config, read_config(config.model.folder))
    nodes = options.nodes if options.nodes is not None else -(-config.train.layout.ranks // max(options.gpus_per_node, 1))
    cluster = Cluster.from_options(nodes, options.gpus_per_node, options.gpu)
    planner = Planner(job, cluster)
    chosen = refusal = None
    if _is_configured(config):
        try:
            chosen = _estimate_configured(planner)
        except UserError as error:
            refusal = error
    search = planner.search(max(options.top, 1))
    if chosen is None:
        if not search.ranked:  # a mistake that no other layout mends
            raise refusal if refusal is not None and search.closest is None else _nothing_fits(cluster, search)
        chosen = search.ranked[0]
        if refusal is not None:
            fix = f"{refusal.fix}; " * bool(refusal.fix) + f"the best layout is {' '.join(chosen.candidate.overrides(config))}"
            refusal = UserError(refusal.field, refusal.value, refusal.rule, fix)
    return Plan(job, cluster, chosen, refusal, search)


def _is_configured(config: Config) -> bool:
    """Return whether the configuration sets the trainer's layout; if not, the plan proposes one."""
    return "layout" in config.train.model_fields_set


def _estimate_configured(planner: Planner) -> CandidateEstimate:
    """Return the estimate of the configured layout. Raise UserError where it does not work."""
    job, cluster = planner.job, planner.cluster
    candidate = Candidate.from_config(job.config)
    check(candidate.facts(job, cluster), PLAN | LAYOUTS, about=LAYOUTS)
    if candidate.gpus > cluster.gpus:
        raise UserError("train.layout", None, f"needs {candidate.gpus} GPUs, {cluster} have {cluster.gpus}", "give more --nodes")
    estimate = planner.with_sync(planner.estimate(candidate))
    if not estimate.fits:
        peak = estimate.fullest
        rule = f"needs {peak.total / GIB:.1f} GiB of a GPU in phase {peak.phase}, of which {usable_bytes(cluster) / GIB:.1f} may be used"
        raise UserError("train.layout", None, rule, "")
    return estimate


def _nothing_fits(cluster: Cluster, search: SearchResult) -> UserError:
    if search.closest is None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in search.dropped.most_common()) or "none to try"
        return UserError("--nodes", cluster.nodes, f"no layout works on {cluster} ({reasons})", "give another number of GPUs")
    peak, layout = search.closest.fullest, search.closest.candidate.describe()
    needed = f"{peak.total / GIB:.1f} GiB in phase {peak.phase}, of which {usable_bytes(cluster) / GIB:.1f} may be used"
    fix = "give more nodes or larger GPUs, or lower train.micro_batch_tokens, rollout.max_total_tokens or answers' lengths"
    return UserError("--nodes", cluster.nodes, f"nothing fits on {cluster}: the closest, {layout}, needs {needed}", fix)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan; bytes and seconds as numbers."""
    config, ranked = plan.job.config, plan.search.ranked
    return {
        "cluster": asdict(plan.cluster),
        "configured": plan.configured,
        "refusal": None if plan.refusal is None else str(plan.refusal),
        "chosen": _estimate_json(plan.chosen, config),
        "host_bytes_per_rank": count_offloaded_bytes(plan.job, plan.chosen.candidate),
        "sample_bytes": count_sample_bytes(plan.job),
        "alignment": [asdict(row) for row in block_alignment.check_alignment(plan.job, plan.chosen.candidate)],
        "seconds_by_reduction": None if plan.job.model.experts else compare_reductions(plan.job, plan.chosen.candidate, plan.cluster),
        "ranked": [{**_estimate_json(estimate, config), "reason": explain_rank(estimate, ranked[0])} for estimate in ranked],
        "tried": plan.search.tried,
        "dropped": dict(plan.search.dropped),
    }


def _estimate_json(estimate: CandidateEstimate, config: Config) -> dict[str, Any]:
    return {
        "candidate": asdict(estimate.candidate),
        "overrides": estimate.candidate.overrides(config),
        "memory": [{**asdict(gpu), "total": gpu.total} for gpu in estimate.memory],
        "spare": estimate.spare,
        "seconds": {**estimate.seconds_by_phase, "step": estimate.seconds.step, "bubble": estimate.seconds.bubble},
        "sync": None if estimate.sync is None else asdict(estimate.sync),
    }
