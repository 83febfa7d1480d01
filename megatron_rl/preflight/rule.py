"""What a rule is, what it may look at, and how the rules are run. Imports without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config import Config
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.hf.create import make_hf_config
from megatron_rl.hf.files import read_config
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import EngineLayout, Layout
from parallel.layout_hints import add_layout_hints
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError

if TYPE_CHECKING:  # imports torch
    from megatron_rl.hf.read import HFCheckpoint


class Needs(Flag):
    """What a rule is about, and so what must be known to check it."""

    TRAINER = auto()
    """There is a trainer, of `model.path`; `eval` has none."""
    MODEL = auto()
    """The model's config.json."""
    LAYOUT = auto()
    """The trainer's layout."""
    ENGINE = auto()
    """The engines' layout."""
    LAUNCH = auto()
    """How many ranks were started, and how many nodes have engines."""
    NODE = auto()
    """The GPUs of a node."""
    MACHINE = auto()
    """This process: its environment, libraries and devices."""
    PLUGS = auto()
    """The user's own modules may be imported."""
    TASK = auto()
    """Problems are asked and scored. Reads files and starts workers, so rank 0 alone checks it."""
    WEIGHTS = auto()
    """The checkpoint's files. Reads all headers, so rank 0 alone checks it."""


RANK_0 = Needs.TASK | Needs.WEIGHTS
"""What takes too long for every rank."""
TRAIN = ~Needs(0)
GRAPH = ~Needs.TASK
PLAN = Needs.TRAINER | Needs.MODEL
"""Of a plan, whatever layout it proposes."""
LAYOUTS = Needs.LAYOUT | Needs.ENGINE | Needs.NODE
EVAL = Needs.ENGINE | Needs.LAUNCH | Needs.NODE | Needs.MACHINE | Needs.PLUGS | Needs.TASK
"""Of an evaluation, whatever it evaluates."""
EVAL_MODEL = Needs.MODEL | Needs.ENGINE
"""Of each model that it evaluates."""


@dataclass(frozen=True, eq=False)
class Facts:
    """What rules look at."""

    config: Config
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json; empty where no rule needs it."""
    folder: Path = Path()
    """The folder with the model's weights."""
    option: str = "model.path"
    """The field or option that names it."""
    geometry: ModelGeometry | None = None
    """The model; None: that of `hf_config`."""
    trainer: Layout | None = None
    """The trainer's layout; None: the configured one."""
    rollout: EngineLayout | None = None
    """The engines' layout; None: the configured one."""
    ranks: int = 1
    """Trainer ranks that were started."""
    engine_nodes: int = 1
    """Nodes that engines are spread over."""
    node_gpus: int = 0
    """GPUs of a node; 0: it has only its CPU."""

    @classmethod
    def here(cls, config: Config, hf_config: Mapping[str, Any] | None = None, folder: Path = Path(), option: str = "model.path") -> Facts:
        """Return the facts of this process, a rank of a run or an evaluation."""
        import torch

        return cls(
            config,
            hf_config or {},
            folder,
            option,
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
            engine_nodes=len(config.rollout.hosts),
            node_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        )

    @cached_property
    def model(self) -> ModelGeometry:
        return self.geometry or ModelGeometry.from_hf_config(self.hf_config)

    @cached_property
    def checkpoint(self) -> HFCheckpoint:
        """The weights' files; opening them reads their headers."""
        from megatron_rl.hf.read import HFCheckpoint

        return HFCheckpoint(self.folder, self.hf_config, self.option)

    @cached_property
    def contract(self) -> PrecisionContract:
        return PrecisionContract.from_config(self.config.precision)

    @cached_property
    def layout(self) -> Layout:
        return self.trainer or self.config.train.layout.to_layout()

    @cached_property
    def engine(self) -> EngineLayout:
        return self.rollout or self.config.rollout.to_layout()


@dataclass(frozen=True)
class Rule:
    """`check` raises UserError, or an InputError of `parallel`, where the mistake is made."""

    check: Callable[[Facts], None]
    needs: Needs
    correction: Mapping[str, object]
    """Overrides that make it hold, which the planner adds to what it suggests."""


RULES: list[Rule] = []
"""All rules, in the order in which they are checked."""


def rule(needs: Needs, correction: Mapping[str, object] | None = None) -> Callable[[Callable[[Facts], None]], Callable[[Facts], None]]:
    """Put a function into the list of rules."""

    def add(check: Callable[[Facts], None]) -> Callable[[Facts], None]:
        RULES.append(Rule(check, needs, correction or {}))
        return check

    return add


def check(facts: Facts, known: Needs, about: Needs | None = None) -> None:
    """Raise UserError for the first mistake. `about`: only rules that need one of these."""
    for each in _select(known, about):
        with as_user_error():
            try:
                each.check(facts)
            except GeometryError as error:
                raise _add_hints(error, facts) from None


def check_run(config: Config, known: Needs = TRAIN) -> Layout:
    """Check a run that this process is a rank of, and return the trainer's layout. No collective: where there are several ranks, none of
    them checks here what rank 0 alone checks (`check_on_rank_0`)."""
    facts = _run_facts(config)
    check(facts, known if facts.ranks == 1 else known & ~RANK_0)
    return facts.layout


def check_on_rank_0(config: Config, known: Needs = TRAIN) -> None:
    """Check what `check_run` left out. To be called on rank 0 once its error reaches the other ranks."""
    facts = _run_facts(config)
    if facts.ranks > 1:
        check(facts, known, about=RANK_0)


def _run_facts(config: Config) -> Facts:
    return Facts.here(config, read_model_config(config), config.model.path)


def find_mistake(facts: Facts, known: Needs, about: Needs) -> UserError | None:
    """Return the first mistake, None without one. For use in bulk: without `check`'s search for layouts that work."""
    try:
        for each in _select(known, about):
            with as_user_error():
                each.check(facts)
    except UserError as error:
        return error
    return None


def find_corrections(facts: Facts, known: Needs) -> dict[str, object]:
    """Return the overrides with which the rules hold that have a correction."""
    overrides: dict[str, object] = {}
    for each in _select(known):
        if each.correction:
            try:
                each.check(facts)
            except UserError:
                overrides |= each.correction
    return overrides


def _select(known: Needs, about: Needs | None = None) -> Iterator[Rule]:
    return (each for each in RULES if each.needs in known and (about is None or each.needs & about))


def _add_hints(error: GeometryError, facts: Facts) -> GeometryError:
    roles = facts.contract.fp8_roles
    return add_layout_hints(error, facts.model, facts.layout, facts.engine, roles, quantized=bool(roles))


def read_model_config(config: Config) -> dict[str, Any]:
    """Return the config.json of the model to train, made from `model.create` where there is none yet. Raise UserError."""
    folder, create = config.model.path, config.model.create
    if create is None or (folder / "config.json").is_file():
        return read_config(folder)
    if folder.exists():
        raise UserError("model.path", str(folder), "exists but holds no config.json", "remove it, or name another folder")
    return make_hf_config(create, 0, config.precision.high)
