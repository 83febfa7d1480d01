"""What a rule is, what it may look at, and how the rules are run. Imports without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.config import Config
from megatron_rl.config.hub import find_model_folder
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.hf.files import read_config
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import EngineLayout, Layout
from parallel.layout_hints import add_layout_hints
from parallel.model_geometry import ModelGeometry
from parallel.plug import InputError
from parallel.shards import GeometryError

if TYPE_CHECKING:  # imports torch
    from megatron_rl.hf.read import HFCheckpoint


class Needs(Flag):
    """What a rule is about, and so what a command must know to check it."""

    TRAINER = auto()  # there is a trainer, of model.path: eval has none
    MODEL = auto()  # the model's config.json
    LAYOUT = auto()  # the trainer's layout
    ENGINE = auto()  # the engines' layout
    LAUNCH = auto()  # how many ranks were started, and how many nodes have engines
    NODE = auto()  # the GPUs of a node
    MACHINE = auto()  # this process: its environment, libraries and devices
    PLUGS = auto()  # the user's modules may be imported
    TASK = auto()  # problems are asked, scored and logged; on rank 0, as it reads files and starts workers
    WEIGHTS = auto()  # the checkpoint's files; on rank 0, as it reads all headers


RANK_0 = Needs.TASK | Needs.WEIGHTS
TRAIN = ~Needs(0)
GRAPH = ~Needs.TASK
PLAN = Needs.TRAINER | Needs.MODEL
LAYOUTS = Needs.LAYOUT | Needs.ENGINE | Needs.NODE  # of each layout that is planned
EVAL = Needs.ENGINE | Needs.LAUNCH | Needs.NODE | Needs.MACHINE | Needs.PLUGS | Needs.TASK
EVAL_MODEL = Needs.MODEL | Needs.ENGINE  # of each model that is evaluated


@dataclass(frozen=True, eq=False)
class Facts:
    """What rules look at."""

    config: Config
    hf_config: Mapping[str, Any] = field(default_factory=dict)  # the model's config.json
    path: Path = Path()  # the model: its folder, or its pinned name on the hub
    option: str = "model.path"  # the field or option that names it
    geometry: ModelGeometry | None = None  # the model; None: that of hf_config
    trainer: Layout | None = None  # None: the configured one
    rollout: EngineLayout | None = None  # None: the configured one
    ranks: int = 1  # of the trainer, as started
    engine_nodes: int = 1  # over which engines are spread
    node_gpus: int = 0  # 0: a node has only its CPU

    @classmethod
    def here(cls, config: Config, **model: Any) -> Facts:
        """Return the facts of this process, a rank of a run or an evaluation. `model`: fields that say which, by default none."""
        import torch

        gpus, ranks = torch.cuda.device_count() if torch.cuda.is_available() else 0, int(os.environ.get("WORLD_SIZE", "1"))
        return cls(config, ranks=ranks, engine_nodes=len(config.rollout.hosts), node_gpus=gpus, **model)

    @cached_property
    def model(self) -> ModelGeometry:
        return self.geometry or ModelGeometry.from_hf_config(self.hf_config)

    @cached_property
    def checkpoint(self) -> HFCheckpoint:
        """The weights' files; opening them reads their headers."""
        from megatron_rl.hf.read import HFCheckpoint

        return HFCheckpoint(find_model_folder(self.path), self.hf_config, self.option)

    @cached_property
    def contract(self) -> PrecisionContract:
        return PrecisionContract.from_config(self.config.precision)

    @cached_property
    def layout(self) -> Layout:
        return self.trainer or self.config.train.layout.to_layout()

    @cached_property
    def engine(self) -> EngineLayout:
        return self.rollout or self.config.rollout.to_layout()


class Rule(NamedTuple):
    check: Callable[[Facts], None]
    """Raises UserError, or an InputError of `parallel`, where the rule is broken."""
    needs: Needs
    correction: Mapping[str, object]
    """Overrides with which it holds, which the planner adds to what it suggests."""


RULES: list[Rule] = []
"""All rules, in the order in which they are checked."""


def rule(needs: Needs, correction: Mapping[str, object] | None = None) -> Callable[[Callable[[Facts], None]], Callable[[Facts], None]]:
    """Put a function into the list of rules."""

    def add(check: Callable[[Facts], None]) -> Callable[[Facts], None]:
        RULES.append(Rule(check, needs, correction or {}))
        return check

    return add


def find_mistakes(facts: Facts, known: Needs, about: Needs | None = None) -> Iterator[tuple[Rule, UserError | InputError]]:
    """Yield the rules that are broken, each with its error. `about`: only rules that need one of these."""
    for each in RULES:
        if each.needs in known and (about is None or each.needs & about):
            try:
                each.check(facts)
            except (UserError, InputError) as error:
                yield each, error


def check(facts: Facts, known: Needs, about: Needs | None = None) -> None:
    """Raise UserError for the first mistake. One of the layouts names those that work, which takes a search."""
    for _, error in find_mistakes(facts, known, about):
        with as_user_error():
            if isinstance(error, GeometryError):
                raise add_layout_hints(error, facts.model, facts.layout, facts.engine, facts.contract.format_of)
            raise error


def check_run(config: Config, known: Needs = TRAIN) -> Layout:
    """Check the run that this process is a rank of, and return the trainer's layout. Raise UserError. No collective: of several ranks,
    none checks what takes long; that is left to `check_on_rank_0`."""
    facts = Facts.here(config, hf_config=read_config(config.model.folder), path=config.model.path)
    check(facts, known if facts.ranks == 1 else known & ~RANK_0)
    return facts.layout


def check_on_rank_0(config: Config, known: Needs = TRAIN) -> None:
    """Check what `check_run` left out; to be called on rank 0 alone, once its UserError reaches the other ranks."""
    facts = Facts.here(config, hf_config=read_config(config.model.folder), path=config.model.path)
    if facts.ranks > 1:
        check(facts, known, about=RANK_0)
