"""What to change if nothing fits on a cluster. Every remedy that is named was tried: with it, a layout works."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.config import Config
from megatron_rl.cost.hardware import GIB, GPUS, Cluster
from megatron_rl.cost.workload import Workload
from megatron_rl.errors import UserError
from megatron_rl.planner.memory_by_phase import usable_bytes
from megatron_rl.planner.search import CandidateEstimate, Planner, SearchResult

_MOST_GPUS = 4096
"""GPUs up to which more nodes are tried."""
_TOKENS = (("rollout", "max_total_tokens"), ("train", "micro_batch_tokens"))
"""Settings whose smaller values take less memory and do not change what is computed."""


def explain(planner: Planner, search: SearchResult) -> UserError:
    """Return why no candidate of a search works, and what helps. A layout that fits, but is refused, comes before one that is too large."""
    cluster, closest = planner.cluster, search.closest
    refusal = None if search.refused is None else _find_refusal(planner, search.refused)
    if search.refused is not None and refusal is not None and (search.refused.fits or closest is None):
        layouts = f"{search.refused.candidate.describe()} with {search.refused.candidate.describe_engines()}"
        rule = f"no layout works on {cluster}: {layouts} {'fits' if search.refused.fits else 'comes closest'}, but {refusal}"
        return UserError("--nodes", cluster.nodes, rule, "".join(f"or give --nodes {nodes}" for nodes in _find_nodes(planner)))
    if closest is None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in search.dropped.most_common()) or "none to try"
        fix = "".join(f"give --nodes {nodes}" for nodes in _find_nodes(planner)) or "no number of nodes helps"
        return UserError("--nodes", cluster.nodes, f"no layout works on {cluster} ({reasons})", fix)
    peak = closest.fullest
    needed = f"{peak.total / GIB:.1f} GiB in phase {peak.phase}, of which {usable_bytes(cluster) / GIB:.1f} may be used"
    rule = f"nothing fits on {cluster}: the closest, {closest.candidate.describe()}, needs {needed}"
    fixes = [f"--nodes {nodes}" for nodes in _find_nodes(planner)]
    fixes += [*_find_gpu(planner, closest), *_find_tokens(planner, closest)]
    if not fixes and refusal is not None:
        fixes = [f"--nodes {nodes} with layouts that are refused now: {refusal}" for nodes in _find_nodes(planner, refused=True)]
    return UserError("--nodes", cluster.nodes, rule, f"give {', or '.join(fixes)}" if fixes else "no more nodes or smaller batches help")


def _find_refusal(planner: Planner, refused: CandidateEstimate) -> UserError | None:
    try:
        refused.candidate.check_on(planner.cluster, planner.job)
    except UserError as error:
        return error
    return None


def _find_nodes(planner: Planner, refused: bool = False) -> Iterator[int]:
    """Yield the smallest number of nodes that works, of 2, 4, 8, ... times as many."""
    cluster = replace(planner.cluster, nodes=2 * planner.cluster.nodes)
    while cluster.gpus <= _MOST_GPUS:
        if Planner(planner.job, cluster).fits_apart(refused):
            yield cluster.nodes
            return
        cluster = replace(cluster, nodes=2 * cluster.nodes)


def _find_gpu(planner: Planner, closest: CandidateEstimate) -> Iterator[str]:
    """Yield the smallest GPU that holds the closest candidate."""
    for name, gpu in sorted(GPUS.items(), key=lambda item: item[1].memory):
        if gpu.memory > planner.cluster.gpu.memory and _fits(planner.job, replace(planner.cluster, gpu=gpu), closest):
            yield f"--gpu {name}"
            return


def _find_tokens(planner: Planner, closest: CandidateEstimate) -> Iterator[str]:
    """Yield the largest values of a setting of `_TOKENS` that help alone, or else of both."""
    config, found = planner.job.config, False
    for fields in (_TOKENS[:1], _TOKENS[1:], _TOKENS):
        values = [getattr(getattr(config, section), field) for section, field in fields]
        while not (found and len(fields) > 1) and max(values) > config.longest_sequence:
            values = [max(min(value, config.longest_sequence), value // 2) for value in values]
            smaller = config
            for (section, field), value in zip(fields, values, strict=True):
                smaller = _with(smaller, section, field, value)
            if _fits(replace(planner.job, config=smaller), planner.cluster, closest):
                found = True
                yield " ".join(f"--{section}.{field}={value}" for (section, field), value in zip(fields, values, strict=True))
                break


def _with(config: Config, section: str, field: str, value: int) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update={field: value})})


def _fits(job: Workload, cluster: Cluster, closest: CandidateEstimate) -> bool:
    planner = Planner(job, cluster)
    return planner.with_sync(planner.estimate(closest.candidate)).fits
