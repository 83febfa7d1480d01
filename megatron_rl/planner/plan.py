"""The dry run of a configuration on a cluster that `megatron-rl plan` prints."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.cost.hardware import GIB, Cluster
from megatron_rl.cost.workload import Candidate, Workload
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.planner.memory_by_phase import count_offloaded_bytes, count_sample_bytes, usable_bytes
from megatron_rl.planner.remedies import explain
from megatron_rl.planner.search import CandidateEstimate, Planner, SearchResult


@dataclass(frozen=True)
class PlanOptions:
    path: Path
    """The configuration file."""
    overrides: tuple[str, ...]
    nodes: int | None
    """Number of nodes, or None for as many as the configured layout needs."""
    gpus_per_node: int
    gpu: str
    top: int
    """Number of layouts to print."""
    json: Path | None
    sbatch: Path | None


@dataclass(frozen=True)
class Plan:
    """A plan. `chosen` is the configured layout if it is set and works, else the best one."""

    job: Workload
    cluster: Cluster
    chosen: CandidateEstimate
    refusal: UserError | None
    """Why the configured layout does not work, or None."""
    search: SearchResult

    @property
    def configured(self) -> bool:
        return self.refusal is None and _is_configured(self.job.config)


def make_plan(config: Config, options: PlanOptions) -> Plan:
    """Plan the run from config.json alone, without torch or weights. Raise UserError if no layout works."""
    job = Workload.from_config(config, read_config(config.model.folder))
    cluster = Cluster.from_options(options.nodes, options.gpus_per_node, options.gpu, config.train.layout.ranks)
    planner = Planner(job, cluster)
    chosen = refusal = None
    if _is_configured(config):
        try:
            chosen = _estimate_configured(planner)
        except UserError as error:
            refusal = error
    search = planner.search(max(options.top, 1))
    if chosen is None:
        if not search.ranked:  # a refused layout has a fix, one that is too large has none
            raise refusal if refusal is not None and refusal.fix else explain(planner, search)
        chosen = search.ranked[0]
        if refusal is not None:
            fix = f"{refusal.fix}; " * bool(refusal.fix) + f"the best layout is {' '.join(chosen.candidate.overrides(config))}"
            refusal = UserError(refusal.field, refusal.value, refusal.rule, fix)
    return Plan(job, cluster, chosen, refusal, search)


def _is_configured(config: Config) -> bool:
    """Return whether the configuration sets the trainer's layout. If not, the plan proposes one."""
    return "layout" in config.train.model_fields_set


def _estimate_configured(planner: Planner) -> CandidateEstimate:
    job, cluster = planner.job, planner.cluster
    candidate = Candidate.from_config(job.config)
    candidate.check_on(cluster, job)
    estimate = planner.with_sync(planner.estimate(candidate))
    if not estimate.fits:
        peak = estimate.fullest
        rule = f"needs {peak.total / GIB:.1f} GiB of a GPU in phase {peak.phase}, of which {usable_bytes(cluster) / GIB:.1f} may be used"
        raise UserError("train.layout", None, rule, "")
    return estimate


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan with bytes and seconds as numbers."""
    config = plan.job.config
    return {
        "cluster": asdict(plan.cluster),
        "configured": plan.configured,
        "refusal": None if plan.refusal is None else str(plan.refusal),
        "chosen": _estimate_json(plan.chosen, config),
        "host_bytes_per_rank": count_offloaded_bytes(plan.job, plan.chosen.candidate),
        "sample_bytes": count_sample_bytes(plan.job),
        "ranked": [_estimate_json(estimate, config) for estimate in plan.search.ranked],
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
