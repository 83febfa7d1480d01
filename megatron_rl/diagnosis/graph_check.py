"""Compares the live precision graphs of trainer and engine at every start of a run and writes them to its folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.distributed import Rank0, errors_on_all_ranks, gather_from_ranks
from megatron_rl.errors import RunError
from megatron_rl.mcore.precision_graph import read_rank_graph
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.graph.graph import (
    KernelVerdict,
    PrecisionGraph,
    compare_kernels,
    describe_differences,
    fold_to_json,
    merge_graphs,
)
from megatron_rl.precision.graph.kernels import DIFFERS, describe_machines
from megatron_rl.precision.graph.render import draw_svg
from megatron_rl.rollout.engine import Engine

_MAX_SHOWN = 4  # differences that the error lists
_SAME_INSTALLATION = "start both from one installation, without other plug-ins or compilers of SGLang"


@dataclass(frozen=True)
class GraphComparison:
    """The whole training graph, one rollout graph per engine rank, and their differences."""

    training: PrecisionGraph
    rollout: tuple[PrecisionGraph, ...]

    @property
    def differences(self) -> list[str]:
        """One line per difference, with the engine rank if only some ranks have it."""
        ranks_of: dict[str, list[int]] = {}
        for rank, graph in enumerate(self.rollout):
            for line in describe_differences(graph, self.training):
                ranks_of.setdefault(line, []).append(rank)
        return [line if len(ranks) == len(self.rollout) else f"engine rank {ranks[0]}: {line}" for line, ranks in ranks_of.items()]

    @property
    def other_kernels(self) -> list[str]:
        """One line per difference of device or packages, and per operator whose kernels differ in their order of sums or are unknown."""
        lines: dict[str, None] = {}
        for graph in self.group_rollout_graphs():
            lines |= dict.fromkeys(describe_machines(graph.machine, self.training.machine))
            differing = (each for each in compare_kernels(graph, self.training) if each.verdict == DIFFERS)
            lines |= dict.fromkeys(f"{each}; {_SAME_INSTALLATION}" for each in differing)
        return list(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data, with one entry for equal layers and equal engine ranks."""
        rollout = [{"ranks": ranks, "graph": fold_to_json(graph)} for graph, ranks in self.group_rollout_graphs().items()]
        verdicts = [each._asdict() | {"rollout": str(each.rollout), "training": str(each.training)} for each in self.compare_kernels()]
        machines = {"training": asdict(self.training.machine), "rollout": asdict(self.rollout[0].machine)}
        graphs = {"training": fold_to_json(self.training), "rollout": rollout}
        return {"differences": self.differences, "machines": machines, "kernels": verdicts, **graphs}

    def compare_kernels(self) -> list[KernelVerdict]:
        """Return the verdicts about the kernels of the first engine rank."""
        return compare_kernels(self.rollout[0], self.training)

    def group_rollout_graphs(self) -> dict[PrecisionGraph, list[int]]:
        ranks_of: dict[PrecisionGraph, list[int]] = {}
        for rank, graph in enumerate(self.rollout):
            ranks_of.setdefault(graph, []).append(rank)
        return ranks_of


def read_training_graph(model: Any) -> Rank0[PrecisionGraph]:
    """Return the graph of the whole trainer. Collective. Raise RunError on every rank if a rank cannot read its graph or two ranks
    disagree."""
    with errors_on_all_ranks():
        rank_graph = read_rank_graph(model)
    rank_graphs = gather_from_ranks(rank_graph, PrecisionGraph)
    return Rank0(lambda: merge_graphs(rank_graphs))


def write_critic_graph(model: Any, folder: Path) -> None:
    """Write the graph of a critic, which the engine does not have, to `folder/graph_critic.json`. Collective."""
    read_training_graph(model).run_local(
        lambda graph: (folder / "graph_critic.json").write_text(json.dumps(fold_to_json(graph), indent=1), encoding="utf-8")
    )


def check_graph(model: Any, engine: Rank0[Engine], contract: PrecisionContract, folder: Path, exact: bool = False) -> None:
    """Write `folder/graph.json` and `folder/graph.svg`. Collective; `model` must be quantized. Raise RunError with the differences if the
    trainer is quantized and the rollout is not a subgraph of the training's forward pass, or if the run promises `exact` log-probs and an
    operator's kernel, a device or a package differs."""
    training = read_training_graph(model)

    def check(engine: Engine) -> None:
        comparison = GraphComparison(training.value, tuple(engine.read_graph()))
        (folder / "graph.json").write_text(json.dumps(comparison.to_json(), indent=1), encoding="utf-8")
        (folder / "graph.svg").write_text(draw_svg(comparison.training, comparison.rollout[0]), encoding="utf-8")
        if contract.trainer_format.quantized and (lines := comparison.differences):
            more = f"; and {len(lines) - _MAX_SHOWN} more, see {folder / 'graph.json'}" if len(lines) > _MAX_SHOWN else ""
            raise RunError(f"the rollout is not a subgraph of the training graph: {'; '.join(lines[:_MAX_SHOWN])}{more}")
        if exact and (lines := comparison.other_kernels):
            more = f" ({len(lines) - 1} more, see {folder / 'graph.json'})" if len(lines) > 1 else ""
            raise RunError(f"the run promises a mismatch of 0, but {lines[0]}{more}")

    engine.run(check)
