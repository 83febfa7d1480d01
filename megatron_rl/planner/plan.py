"""The dry run of a configuration on a cluster: what `megatron-rl plan` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.cross_checks import check_lengths
from megatron_rl.errors import UserError
from megatron_rl.hf.create import make_hf_config
from megatron_rl.hf.files import read_config
from megatron_rl.planner import block_alignment
from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.hardware import GIB, Cluster
from megatron_rl.planner.memory_by_phase import count_offloaded_bytes, usable_bytes
from megatron_rl.planner.search import CandidateEstimate, Planner, SearchResult, explain_rank
from parallel.shards import GeometryError


@dataclass(frozen=True)
class PlanOptions:
    """What was asked on the command line."""

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
    """What was found. `chosen` is the configured layout where one is configured and works, else the best."""

    job: Workload
    cluster: Cluster
    chosen: CandidateEstimate
    refusal: UserError | None
    """Why the configured layout does not work."""
    search: SearchResult

    @property
    def configured(self) -> bool:
        """`chosen` is what the configuration says."""
        return self.refusal is None and _is_configured(self.job.config)


def make_plan(config: Config, request: PlanOptions) -> Plan:
    """Plan the run. No process, no torch, no weights: config.json is all that is read."""
    job = _job(config)
    needed = _configured_ranks(config)
    nodes = request.nodes if request.nodes is not None else -(-needed // max(request.gpus_per_node, 1))
    cluster = Cluster.from_options(nodes, request.gpus_per_node, request.gpu)
    planner = Planner(job, cluster)
    chosen, refusal = None, None
    if _is_configured(config):
        chosen, refusal = _estimate_configured(planner)
    found = planner.search(("colocated", "disaggregated"), max(request.top, 1))
    if chosen is None and found.ranked:
        chosen = found.ranked[0]
        if refusal is not None:
            refusal = UserError(refusal.field, refusal.value, refusal.rule, _with_best(refusal.fix, chosen, config))
    if chosen is None:
        raise _nothing_fits(cluster, found)
    return Plan(job, cluster, chosen, refusal, found)


def _job(config: Config) -> Workload:
    folder, create = config.model.path, config.model.create
    if create is None or (folder / "config.json").is_file():
        hf_config = read_config(folder)
    else:
        hf_config = make_hf_config(create, 0, config.precision.high)
    check_lengths(config, hf_config)
    try:
        return Workload.from_config(config, hf_config)
    except GeometryError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None


def _is_configured(config: Config) -> bool:
    """Whether the configuration says how the trainer is cut; if not, the plan proposes it."""
    return "layout" in config.train.model_fields_set


def _configured_ranks(config: Config) -> int:
    sizes = config.train.layout
    return sizes.tp * sizes.pp * sizes.dp * getattr(sizes, "cp", 1)


def _estimate_configured(planner: Planner) -> tuple[CandidateEstimate | None, UserError | None]:
    """(the configured layout, None), or (None, why it does not work)."""
    job, cluster = planner.job, planner.cluster
    try:
        candidate = Candidate.from_config(job.config, cluster)
    except GeometryError as error:
        return None, UserError(f"train.{error.field}", error.value, error.rule, error.fix)
    if candidate.rollout_tp > cluster.gpus_per_node:
        return None, UserError("rollout.tp", candidate.rollout_tp, f"is more than a node's {cluster.gpus_per_node} GPUs", "use fewer")
    if candidate.gpus > cluster.gpus:
        return None, UserError("train.layout", None, f"needs {candidate.gpus} GPUs, {cluster} have {cluster.gpus}", "give more --nodes")
    refused = block_alignment.validate_trainer_layout(job, candidate.train)
    refused = refused or block_alignment.validate_engine_layout(job, candidate.rollout_tp, candidate.rollout_ep)
    if refused is not None:
        return None, block_alignment.to_user_error(refused, job, candidate)
    verdict = planner.estimate(candidate)
    if not verdict.fits:
        side = verdict.fullest
        rule = f"needs {side.total / GIB:.1f} GiB of a GPU in phase {side.phase}, of which {usable_bytes(cluster) / GIB:.1f} may be used"
        return None, UserError("train.layout", None, rule, "")
    return planner.with_sync(verdict), None


def _with_best(fix: str, best: CandidateEstimate, config: Config) -> str:
    return f"{fix}; " * bool(fix) + f"the best layout is {' '.join(best.candidate.overrides(config))}"


def _nothing_fits(cluster: Cluster, found: SearchResult) -> UserError:
    if found.closest is None:
        reasons = ", ".join(f"{count} {why}" for why, count in found.dropped.most_common()) or "none to try"
        return UserError("--nodes", cluster.nodes, f"no layout works on {cluster} ({reasons})", "give another number of GPUs")
    side, words = found.closest.fullest, found.closest.candidate.describe()
    room = f"{side.total / GIB:.1f} GiB in phase {side.phase}, of which {usable_bytes(cluster) / GIB:.1f} may be used"
    fix = "give more nodes or larger GPUs, or lower train.micro_batch_tokens, rollout.max_total_tokens or answers' lengths"
    return UserError("--nodes", cluster.nodes, f"nothing fits on {cluster}: the closest, {words}, needs {room}", fix)


def as_json(plan: Plan) -> dict[str, Any]:
    """All of the plan: bytes and seconds as numbers."""
    config, ranked = plan.job.config, plan.search.ranked
    return {
        "cluster": asdict(plan.cluster),
        "configured": plan.configured,
        "refusal": None if plan.refusal is None else str(plan.refusal),
        "chosen": _verdict_json(plan.chosen, config),
        "host_bytes_per_rank": count_offloaded_bytes(plan.job, plan.chosen.candidate),
        "alignment": [asdict(row) for row in block_alignment.check_alignment(plan.job, plan.chosen.candidate)],
        "ranked": [{**_verdict_json(verdict, config), "reason": explain_rank(verdict, ranked[0])} for verdict in ranked],
        "tried": plan.search.tried,
        "dropped": dict(plan.search.dropped),
    }


def _verdict_json(verdict: CandidateEstimate, config: Config) -> dict[str, Any]:
    return {
        "candidate": asdict(verdict.candidate),
        "overrides": verdict.candidate.overrides(config),
        "memory": [{**asdict(side), "total": side.total} for side in verdict.memory],
        "spare": verdict.spare,
        "seconds": {**verdict.seconds_by_phase, "step": verdict.seconds.step, "bubble": verdict.seconds.bubble},
        "sync": None if verdict.sync is None else asdict(verdict.sync),
    }
