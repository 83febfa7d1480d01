"""Prints a plan as tables on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_rl.cost.hardware import GIB, LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.cost.workload import MEAN_LENGTH_SHARE, Workload
from megatron_rl.planner.memory_by_phase import count_kept_bytes, count_offloaded_bytes, count_sample_bytes, usable_bytes
from megatron_rl.planner.search import CandidateEstimate, SearchResult
from megatron_rl.reporting.formatting import format_bytes
from parallel.adapters import is_adapter

if TYPE_CHECKING:
    from megatron_rl.planner.plan import Plan

_TEXT = ("", "link", "placement", "train", "engines")


def make_console() -> Console:
    """Return a console that is 120 columns wide if the output is not a terminal."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 120
    return console


def make_table(title: str, heads: Sequence[str], left: Collection[str], narrow: str = "") -> Table:
    """Return a table whose columns are aligned right, except those in `left`. `narrow` is not wrapped."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", overflow="fold", no_wrap=head == narrow)
    return table


def print_plan(plan: Plan) -> None:
    console = make_console()
    job, chosen = plan.job, plan.chosen
    console.print(_headline(job, plan.cluster), soft_wrap=True)
    title, layouts = "As configured" if plan.configured else "The best layout", chosen.candidate
    console.print(f"{title}: {layouts.placement}; train {layouts.describe()}; engines {layouts.describe_engines()}\n")
    console.print(_memory(chosen, plan.cluster))
    if host := count_offloaded_bytes(job, chosen.candidate):
        console.print(f"While the engine generates, {host / GIB:.1f} GiB of each trainer rank lie in host memory.")
    samples = count_sample_bytes(job) / GIB
    console.print(
        f"A step's samples take up to {samples:.2g} GiB of rank 0's host memory, {samples / layouts.train.dp:.2g} of every other's."
    )
    if kept := count_kept_bytes(job):
        console.print(f"The groups kept for replay take up to {kept / GIB:.2g} GiB more of rank 0's.")
    if problem := chosen.candidate.find_launch_problem(job, plan.cluster):
        console.print(f"No batch script starts this as it is: {problem}.")
    console.print()
    console.print(_sync(chosen, plan.cluster))
    console.print(_ranked(plan.search))
    for number, estimate in enumerate(plan.search.ranked, 1):
        console.print(f"{number}. {' '.join(estimate.candidate.overrides(job.config)) or 'as configured'}", soft_wrap=True)
    console.print(_left_out(plan.search))
    console.print(
        "Memory is counted from the shards, activations by formula. Seconds are rooflines: products at rates measured on one H200, "
        f"{LINK_EFFICIENCY:.0%} of bandwidths, sequences {MEAN_LENGTH_SHARE:.0%} of the longest."
    )


def _headline(job: Workload, cluster: Cluster) -> str:
    precision, rollout = job.config.precision, job.config.rollout
    sizes = {name: tensor.rows * tensor.cols for name, tensor in job.model.tensors().items()}
    adapters = sum(size for name, size in sizes.items() if is_adapter(name.removesuffix(".weight")))
    size = f"{(sum(sizes.values()) - adapters) / 1e9:.2f} billion parameters"
    size += f", {adapters / 1e6:.1f} million in adapters" * (adapters > 0)
    flow = precision.mode + (f" by {precision.backend}" if job.contract.trainer_format.quantized else "")
    return (
        f"{job.config.model.name}: {job.model.family}, {size}, {flow}, on {cluster}. A step: "
        f"{rollout.prompts_per_step} prompts x {rollout.group_size} answers, up to {job.config.longest_sequence} tokens each"
    )


def _memory(estimate: CandidateEstimate, cluster: Cluster) -> Table:
    gpus = estimate.memory
    columns = [gpu.phase if estimate.candidate.colocated else f"{gpu.phase}\n{gpu.gpus}" for gpu in gpus]
    table = _table(f"GiB on the fullest GPU, of {_gib(usable_bytes(cluster))} to be used", ["", *columns])
    for part in dict.fromkeys(part for gpu in gpus for part in gpu.parts):
        if any(gpu.parts.get(part) for gpu in gpus):
            table.add_row(part, *(_gib(gpu.parts.get(part, 0)) for gpu in gpus))
    table.add_section()
    table.add_row("total", *(_gib(gpu.total) for gpu in gpus))
    table.add_row("free", *(_gib(usable_bytes(cluster) - gpu.total) for gpu in gpus))
    return table


def _sync(estimate: CandidateEstimate, cluster: Cluster) -> Table:
    traffic = estimate.sync
    assert traffic is not None
    later = sum(traffic.total.values())
    title = f"One sync: {format_bytes(later)}, an estimated {traffic.seconds:.2g} s without the proof"
    if later != traffic.first:
        title = f"The first sync: {format_bytes(traffic.first)}. Each other {title[4:]}"
    table = _table(title, ["link", "all GPUs", "busiest GPU", "bandwidth"])
    for link, name, rate in (
        ("same", "within a GPU", cluster.gpu.hbm),
        ("node", "NVLink, within a node", cluster.gpu.nvlink),
        ("network", "between nodes", NETWORK_BANDWIDTH),
    ):
        table.add_row(name, format_bytes(traffic.total[link]), format_bytes(traffic.busiest[link]), f"{format_bytes(rate)}/s")
    return table


def _ranked(search: SearchResult) -> Table:
    heads = ["", "placement", "train", "engines", "free GiB", "step s", "generate s", "train s", "sync s", "bubble"]
    table = _table("Layouts that fit, the fastest first", heads)
    for number, estimate in enumerate(search.ranked, 1):
        candidate, seconds = estimate.candidate, estimate.seconds
        times = [f"{value:.3g}" for value in (seconds.step, seconds.generate, seconds.trainer, seconds.sync)]
        names = [candidate.placement, candidate.describe(), candidate.describe_engines()]
        table.add_row(str(number), *names, _gib(estimate.spare), *times, f"{seconds.bubble:.1%}")
    return table


def _left_out(search: SearchResult) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in search.dropped.most_common())
    return f"{search.tried} placements tried" + (f": {reasons}" if reasons else "") + "."


def _table(title: str, heads: list[str]) -> Table:
    return make_table(title, heads, _TEXT, heads[0])


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size else ""
