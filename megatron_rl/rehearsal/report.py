"""Report of a rehearsal by rank: faults, memory against the plan, host waits, traffic, and lower bounds of a step."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron_rl.cost.hardware import GIB, Cluster
from megatron_rl.cost.weights import count_layer_kinds
from megatron_rl.cost.workload import Candidate, Workload
from megatron_rl.planner.memory_by_phase import CUDA_CONTEXT_BYTES, count_trainer_parts
from megatron_rl.planner.tables import make_console, make_table
from megatron_rl.rehearsal.bound import Bound, count_least_bytes, estimate_bound
from megatron_rl.rehearsal.engine_rank import TOLERANCE, EngineRankReport
from megatron_rl.rehearsal.job import RankRehearsal
from megatron_rl.rehearsal.recorder import Phase

PLANNED = {
    "sync": "sync",
    "checkpoint": "checkpoint",
    "logprobs 2": "logprobs",
    "critic 2": "critic",
    "update 2": "train",
    "resume": "resume",
}
"""Maps phases of the rehearsal in which everything is allocated to phases of the plan."""
_MAY_WAIT = "megatron_rl/mcore/layers/moe/token_counts.py"
"""The host must know how many tokens an all-to-all of experts sends where: one wait per layer whose router does not replay a record."""
_LINES = 12


@dataclass(frozen=True)
class PhaseReport:
    """One phase on one rank."""

    phase: Phase
    planned: float | None
    """Planned bytes without the CUDA context, or None if the plan has no such phase."""
    bound: Bound | None
    """Lower bound of a real step, or None for phases without passes."""
    least: float | None
    """Least bytes that element-wise kernels can move, or None if unknown."""

    @property
    def difference(self) -> float | None:
        return None if self.planned is None else self.planned / self.phase.peak.nbytes - 1

    @property
    def agrees(self) -> bool:
        return self.difference is None or abs(self.difference) <= TOLERANCE

    def as_json(self) -> dict[str, Any]:
        phase, peak = self.phase, self.phase.peak
        return phase.as_json() | {
            "held_bytes": phase.held,
            "peak_bytes": peak.nbytes,
            "peak_by_line": {line: nbytes for line, nbytes in Counter(peak.by_line).most_common(_LINES) if nbytes},
            "left_bytes": phase.left,
            "host_peak_bytes": phase.host_peak,
            "written_bytes": phase.written,
            "planned_bytes": self.planned,
            "operator_bytes": phase.traffic,
            "bytes_by_kind": _sum_by_kind(phase),
            "bytes_by_line": [{"kind": kind, "line": line, "bytes": count} for (kind, line), count in phase.moved.most_common()],
            "bound": self.bound.as_json() if self.bound else None,
            "least_elementwise_bytes": self.least,
            "micro_batches": phase.passes,
            "collectives": [
                {"kind": kind, "group": group, "line": line, "count": count, "bytes": nbytes}
                for (kind, group, line), (count, nbytes) in sorted(phase.collectives.items(), key=lambda entry: -entry[1][1])
            ],
        }


@dataclass(frozen=True)
class RankReport:
    """One trainer rank."""

    rank: int
    stage: int
    fault: str
    layers: int
    phases: list[PhaseReport]

    @property
    def passes(self) -> bool:
        return not self.fault and not self.waits_per_layer and all(phase.agrees for phase in self.phases)

    @property
    def waits_per_layer(self) -> dict[str, int]:
        """Lines in which the host waits in every layer of every micro-batch, with the number of waits per layer. If routers replay a
        record, a single wait for token counts is reported too."""
        found: dict[str, int] = {}
        for phase in (each.phase for each in self.phases):
            for (kind, line), count in phase.waits_in_passes.items():
                most = phase.choices if line.startswith(_MAY_WAIT) else self.layers * phase.passes - 1
                if phase.passes and count > most:
                    found[f"{line} ({kind})"] = max(1, count // (self.layers * phase.passes))
        return found

    def as_json(self) -> dict[str, Any]:
        names = ("rank", "stage", "fault", "waits_per_layer", "passes")
        return {name: getattr(self, name) for name in names} | {"phases": [phase.as_json() for phase in self.phases]}


def make_report(rehearsal: RankRehearsal, job: Workload, cluster: Cluster) -> RankReport:
    """Compare a rank with the plan of its stage."""
    candidate = Candidate.from_config(job.config)
    stage = candidate.train.coordinates(rehearsal.rank).pp
    phases = []
    for phase in rehearsal.phases:
        planned = None
        if phase.name in PLANNED and not rehearsal.fault:
            planned = sum(count_trainer_parts(job, candidate, stage, PLANNED[phase.name]).values()) - CUDA_CONTEXT_BYTES
        bound = estimate_bound(phase, job, candidate, cluster)
        least = count_least_bytes(phase, bound, job, candidate, stage) if bound else None
        phases.append(PhaseReport(phase, planned, bound, least))
    layers = sum(count_layer_kinds(job.model, candidate.train, stage))
    return RankReport(rehearsal.rank, stage, rehearsal.fault, layers, phases)


def _sum_by_kind(phase: Phase) -> dict[str, int]:
    """Return the bytes that kernels read and write by kind, largest first."""
    sums: Counter[str] = Counter()
    for (kind, _), count in phase.moved.items():
        sums[kind] += count
    return dict(sums.most_common())


def print_report(reports: list[RankReport], engine: list[EngineRankReport]) -> None:
    """Print all ranks, with the bounds of the phases that a step repeats."""
    console = make_console()
    for report in reports:
        console.print(f"\nRank {report.rank}, pipeline stage {report.stage}")
        if report.fault:
            console.print(f"FAULT: {report.fault}", soft_wrap=True)
        for line, count in report.waits_per_layer.items():
            console.print(f"WAITS in every layer, {count} a micro-batch: {line}", soft_wrap=True)
        console.print(_memory(report))
        for each in report.phases:
            if each.phase.passes and each.phase.name in PLANNED:
                console.print(_waits(each.phase))
                if each.bound:
                    console.print(_bound(each.phase.name, each.bound))
                    if each.least:
                        ratio = each.bound.elementwise / each.least
                        console.print(f"{each.phase.name}: element-wise kernels move {ratio:.2f} times the least possible bytes.\n")
    for line in (found.fault for found in engine if found.fault):
        console.print(f"FAULT: {line}", soft_wrap=True)
    console.print(_engine(engine))
    for found in engine:
        if found.forward:
            console.print(_passes(found, found.forward))
    if not any(found.forward for found in engine):
        console.print("The engine's forward passes were not rehearsed: SGLang's own gated delta nets (precision.mode) are not supported.")
    wrong = [f"rank {report.rank}" for report in reports if not report.passes]
    wrong += [f"engine rank {found.rank}" for found in engine if not found.passes]
    good = f"All {len(reports)} ranks run, take the memory that `plan` says, and wait in no layer for the device."
    verdict = f"NOT as planned: {', '.join(wrong)}." if wrong else good
    console.print(f"\n{verdict} Nothing has run on a GPU.")


def _memory(report: RankReport) -> Table:
    heads = ["phase", "held", "peak GiB", "plan", "differs", "host", "reached at", "operators"]
    table = _table("Memory", heads)
    for each in report.phases:
        phase, planned = each.phase, each.planned
        differs = "" if each.difference is None else f"{each.difference:+.1%}" + ("" if each.agrees else " !")
        gib = [f"{phase.held / GIB:.2f}", f"{phase.peak.nbytes / GIB:.2f}", "" if planned is None else f"{planned / GIB:.2f}"]
        at = f"{phase.peak.at} {phase.peak.line}"
        table.add_row(phase.name, *gib, differs, f"{phase.host_peak / GIB:.2f}", at, str(phase.operators))
    return table


def _engine(engine: list[EngineRankReport]) -> Table:
    table = _table("Engine: what a sync finds to fill", ["rank", "kind", "tensors", "GiB", "plan", "differs"])
    for rank in engine:
        sizes = [f"{rank.bytes / GIB:.2f}", f"{rank.planned / GIB:.2f}", f"{rank.planned / rank.bytes - 1:+.1%}"]
        table.add_row(str(rank.rank), rank.model, str(rank.tensors), *sizes)
    return table


def _passes(rank: EngineRankReport, forward: dict[str, Any]) -> Table:
    batches = f"{forward['prefill_tokens']} tokens of prompts; {forward['decode_requests']} requests of {forward['context']} tokens"
    graphs = f"graphs of {len(forward['captured'])} of {forward['capturable']} batch sizes"
    needed = f"graphs and passes need {rank.needed / GIB:.2f} GiB, of {rank.workspace / GIB:.2f} in the plan"
    title = f"Engine rank {rank.rank}, {forward['attention']}: {batches}; {graphs}; {needed}"
    table = _table(title, ["pass", "activations GiB", "reached at", "operators", "products s", "memory s", "exchange s", "host waits"])
    for each in forward["phases"]:
        seconds = [f"{each['seconds'][name]:.3g}" for name in ("products", "memory", "exchange")]
        at, waits = each["peak_at"], sum(wait["count"] for wait in each["host_waits"])
        size = f"{each['activation_bytes'] / GIB:.2f}"
        table.add_row(each["phase"], size, f"{at['operator']} {at['line']}", str(each["operators"]), *seconds, str(waits))
    return table


def _waits(phase: Phase) -> Table:
    total, within = sum(phase.waits.values()), sum(phase.waits_in_passes.values())
    title = f"{phase.name}: the host waits {total} times for the device, {within} of them in {phase.passes} micro-batches"
    table = _table(title, ["times", "in micro-batches", "for", "line"])
    for (kind, line), count in phase.waits.most_common(_LINES):
        table.add_row(str(count), str(phase.waits_in_passes[kind, line] or ""), kind, line)
    return table


def _bound(name: str, bound: Bound) -> Table:
    each = f"{bound.kernels:.3g} kernels, {1e6 * bound.total / bound.kernels:.3g} us each"
    times = f"{bound.total:.3g} s ({each}), {bound.hidden:.2g} s of communication hidden"
    table = _table(f"{name}: bound of a real step, {bound.passes} passes: {times}", ["kind", "seconds", "share"])
    for kind, seconds in bound.seconds.items():
        table.add_row(kind, f"{seconds:.3g}", f"{seconds / bound.total:.1%}")
    return table


def _table(title: str, heads: list[str]) -> Table:
    return make_table(title, heads, ("phase", "pass", "kind", "for", "line", "reached at"))
