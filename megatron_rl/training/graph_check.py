"""The two live graphs side by side: gathered from all ranks, kept in the run's folder, and compared at every start of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from megatron_rl.distributed import is_rank0, raise_on_all_ranks, run_on_rank0
from megatron_rl.errors import RunError
from megatron_rl.mcore.precision_graph import read_rank_graph
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.graph.graph import PrecisionGraph, describe_differences, fold_to_json, merge_graphs
from megatron_rl.precision.graph.svg import draw_svg
from megatron_rl.rollout.engine import Engine

_SHOWN = 4


@dataclass(frozen=True)
class GraphComparison:
    """The whole training graph, one rollout graph per engine rank, and what they do not share."""

    training: PrecisionGraph
    rollout: tuple[PrecisionGraph, ...]

    @property
    def differences(self) -> list[str]:
        """Lines; the engine's rank is named where not all ranks differ alike."""
        ranks_of: dict[str, list[int]] = {}
        for rank, graph in enumerate(self.rollout):
            for line in describe_differences(graph, self.training):
                ranks_of.setdefault(line, []).append(rank)
        everywhere = len(self.rollout)
        return [line if len(ranks) == everywhere else f"engine rank {ranks[0]}: {line}" for line, ranks in ranks_of.items()]

    def to_json(self) -> dict[str, Any]:
        """Layers that are alike told once; rollout ranks that are alike once as well."""
        rollout = [{"ranks": ranks, "graph": fold_to_json(graph)} for graph, ranks in self.group_rollout_graphs().items()]
        return {"differences": self.differences, "training": fold_to_json(self.training), "rollout": rollout}

    def group_rollout_graphs(self) -> dict[PrecisionGraph, list[int]]:
        """PrecisionGraph -> engine ranks that have it."""
        found: dict[PrecisionGraph, list[int]] = {}
        for rank, graph in enumerate(self.rollout):
            found.setdefault(graph, []).append(rank)
        return found


def read_training_graph(model: Any) -> PrecisionGraph | None:
    """The graph of the whole trainer, on rank 0; None on other ranks. Collective; a RunError is raised on every rank."""
    part, broken = None, None
    try:
        part = read_rank_graph(model)
    except RunError as error:
        broken = error
    raise_on_all_ranks(broken)
    parts = [part]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.gather_object(part, parts if is_rank0() else None)
    return _merged_on_rank0(parts)


def _merged_on_rank0(parts: Sequence[PrecisionGraph | None]) -> PrecisionGraph | None:
    """`merge_graphs` on rank 0. Raises RunError on every rank where ranks tell a part differently."""
    found: list[PrecisionGraph] = []

    def merge() -> None:
        try:
            found.append(merge_graphs(cast(Sequence[PrecisionGraph], parts)))
        except ValueError as error:
            raise RunError(f"the trainer's precision graph: {error}") from None

    run_on_rank0(merge)
    return found[0] if found else None


def check_graph(model: Any, engine: Engine | None, contract: PrecisionContract, folder: Path) -> None:
    """Writes `folder/graph.json` and `folder/graph.svg`. In unified FP8, where the rollout is not a subgraph of the training's forward
    pass, raises RunError with the edges that differ. Collective; `model` must be quantised, `engine` lives on rank 0."""
    training = read_training_graph(model)

    def check() -> None:
        comparison = GraphComparison(cast(PrecisionGraph, training), tuple(cast(Engine, engine).read_graph()))
        (folder / "graph.json").write_text(json.dumps(comparison.to_json(), indent=1))
        (folder / "graph.svg").write_text(draw_svg(comparison.training, comparison.rollout[0]))
        if contract.train_fp8 and (lines := comparison.differences):
            more = f"; and {len(lines) - _SHOWN} more, see {folder / 'graph.json'}" if len(lines) > _SHOWN else ""
            raise RunError(f"the rollout is no subgraph of the training: {'; '.join(lines[:_SHOWN])}{more}")

    run_on_rank0(check)
