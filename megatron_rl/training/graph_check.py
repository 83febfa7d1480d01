"""The two live graphs side by side: gathered from all ranks, kept in the run's folder, and compared at every start of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from megatron_rl.distributed import is_rank0, on_rank0, raise_together
from megatron_rl.errors import RunError
from megatron_rl.mcore.precision_graph import rank_graph
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.graph.graph import Graph, differences, folded_json, merged
from megatron_rl.precision.graph.svg import draw
from megatron_rl.rollout.engine import Engine

_SHOWN = 4


@dataclass(frozen=True)
class Comparison:
    """The whole training graph, one rollout graph per engine rank, and what they do not share."""

    training: Graph
    rollout: tuple[Graph, ...]

    @property
    def differences(self) -> list[str]:
        """Lines; the engine's rank is named where not all ranks differ alike."""
        ranks_of: dict[str, list[int]] = {}
        for rank, graph in enumerate(self.rollout):
            for line in differences(graph, self.training):
                ranks_of.setdefault(line, []).append(rank)
        everywhere = len(self.rollout)
        return [line if len(ranks) == everywhere else f"engine rank {ranks[0]}: {line}" for line, ranks in ranks_of.items()]

    def to_json(self) -> dict[str, Any]:
        """Layers that are alike told once; rollout ranks that are alike once as well."""
        rollout = [{"ranks": ranks, "graph": folded_json(graph)} for graph, ranks in self.rollouts().items()]
        return {"differences": self.differences, "training": folded_json(self.training), "rollout": rollout}

    def rollouts(self) -> dict[Graph, list[int]]:
        """Graph -> engine ranks that have it."""
        found: dict[Graph, list[int]] = {}
        for rank, graph in enumerate(self.rollout):
            found.setdefault(graph, []).append(rank)
        return found


def training_graph(model: Any) -> Graph | None:
    """The graph of the whole trainer, on rank 0; None on other ranks. Collective; a RunError is raised on every rank."""
    part, broken = None, None
    try:
        part = rank_graph(model)
    except RunError as error:
        broken = error
    raise_together(broken)
    parts = [part]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.gather_object(part, parts if is_rank0() else None)
    return _merged_on_rank0(parts)


def _merged_on_rank0(parts: Sequence[Graph | None]) -> Graph | None:
    """`merged` on rank 0. Raises RunError on every rank where ranks tell a part differently."""
    found: list[Graph] = []

    def merge() -> None:
        try:
            found.append(merged(cast(Sequence[Graph], parts)))
        except ValueError as error:
            raise RunError(f"the trainer's precision graph: {error}") from None

    on_rank0(merge)
    return found[0] if found else None


def check_graph(model: Any, engine: Engine | None, contract: PrecisionContract, folder: Path) -> None:
    """Writes `folder/graph.json` and `folder/graph.svg`. In unified FP8, where the rollout is not a subgraph of the training's forward
    pass, raises RunError with the edges that differ. Collective; `model` must be quantised, `engine` lives on rank 0."""
    training = training_graph(model)

    def check() -> None:
        comparison = Comparison(cast(Graph, training), tuple(cast(Engine, engine).graph()))
        (folder / "graph.json").write_text(json.dumps(comparison.to_json(), indent=1))
        (folder / "graph.svg").write_text(draw(comparison.training, comparison.rollout[0]))
        if contract.train_fp8 and (lines := comparison.differences):
            more = f"; and {len(lines) - _SHOWN} more, see {folder / 'graph.json'}" if len(lines) > _SHOWN else ""
            raise RunError(f"the rollout is no subgraph of the training: {'; '.join(lines[:_SHOWN])}{more}")

    on_rank0(check)
