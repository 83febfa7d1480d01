"""Definition of a preflight check, of what it may look at, and of how checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.config import Config
from megatron_rl.config.hub import HubModel, find_model_folder
from megatron_rl.config.launch import read_launch
from megatron_rl.errors import RunError, UserError, as_user_error
from megatron_rl.hf.files import read_config
from megatron_rl.hf.hub import pin_hub_model
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import EngineLayout, Layout
from parallel.layout_hints import add_layout_hints
from parallel.model_geometry import ModelGeometry
from parallel.plug import InputError
from parallel.shards import GeometryError

if TYPE_CHECKING:  # imports torch
    from megatron_rl.data import ProblemStream
    from megatron_rl.hf.read import HFCheckpoint
    from megatron_rl.types import Problem


class Needs(Flag):
    """What a command must know to run a check."""

    TRAINER = auto()  # there is a trainer that trains model.path
    MODEL = auto()  # config.json of the model
    LAYOUT = auto()  # layout of the trainer
    ENGINE = auto()  # layout of the engines
    LAUNCH = auto()  # number of started ranks and of nodes with engines
    NODE = auto()  # GPUs of a node
    MACHINE = auto()  # environment, libraries and devices of this process
    PLUGS = auto()  # user modules may be imported
    TASK = auto()  # problems, rewards and trackers; rank 0 only, because it reads files and starts workers
    WEIGHTS = auto()  # files of the checkpoint; rank 0 only, because it reads all headers


ALONE = Needs.TRAINER  # settings that need neither a model nor a machine
RANK_0 = Needs.TASK | Needs.WEIGHTS
TRAIN = ~Needs(0)
GRAPH = ~Needs.TASK
PLAN = Needs.TRAINER | Needs.MODEL
LAYOUTS = Needs.LAYOUT | Needs.ENGINE | Needs.NODE  # checked for each planned layout
EVAL = Needs.ENGINE | Needs.LAUNCH | Needs.NODE | Needs.MACHINE | Needs.PLUGS | Needs.TASK
EVAL_MODEL = Needs.MODEL | Needs.ENGINE | Needs.NODE  # checked for each evaluated model


@dataclass(frozen=True, eq=False)
class Facts:
    """What checks may look at."""

    config: Config
    hf_config: Mapping[str, Any] = field(default_factory=dict)  # config.json of the model
    path: Path = Path()  # folder of the model, or its pinned name on the hub
    option: str = "model.path"  # field or option that names the model
    geometry: ModelGeometry | None = None  # None: read from hf_config
    trainer: Layout | None = None  # None: the configured layout
    rollout: EngineLayout | None = None  # None: the configured layout
    ranks: int = 1  # number of started trainer ranks
    engine_nodes: int = 1  # number of nodes with engines
    node_gpus: int = 0  # 0: nodes without GPUs
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability of these GPUs

    @classmethod
    def here(cls, config: Config, **model: Any) -> Facts:
        """Return the facts of this process. `model` sets fields that describe the model; by default there is no model."""
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        model["capability"] = torch.cuda.get_device_capability() if gpus else (0, 0)
        return cls(config, ranks=read_launch().size, engine_nodes=len(config.rollout.hosts), node_gpus=gpus, **model)

    @cached_property
    def model(self) -> ModelGeometry:
        return self.geometry or ModelGeometry.from_hf_config(self.hf_config)

    @cached_property
    def checkpoint(self) -> HFCheckpoint:
        """The checkpoint of the model. Opening it reads the headers of its files."""
        from megatron_rl.hf.read import HFCheckpoint

        return HFCheckpoint(find_model_folder(self.path), self.hf_config, self.option)

    @cached_property
    def _data(self) -> tuple[ProblemStream, list[Problem]]:
        from megatron_rl.data import check_data

        return check_data(self.config.data, self.config.model.folder)

    @property
    def problems(self) -> ProblemStream:
        """The training problems. Reads all data."""
        return self._data[0]

    @property
    def first_problems(self) -> Sequence[Problem]:
        """The first problems of each training set, and the held-out problems. Empty without a model, whose tokenizer they need."""
        return self._data[1] if self.path != Path() else ()

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
    check: Callable[[Facts], None]  # raises UserError, or an InputError of `parallel`, if the configuration is refused
    needs: Needs
    correction: Mapping[str, object]  # overrides that make the check pass. The planner adds them to its suggestions.


RULES: list[Rule] = []  # all checks in the order in which they run


def rule(needs: Needs, correction: Mapping[str, object] | None = None) -> Callable[[Callable[[Facts], None]], Callable[[Facts], None]]:
    """Return a decorator that appends a function to `RULES`."""

    def add(check: Callable[[Facts], None]) -> Callable[[Facts], None]:
        RULES.append(Rule(check, needs, correction or {}))
        return check

    return add


def find_mistakes(facts: Facts, known: Needs, about: Needs | None = None) -> Iterator[tuple[Rule, UserError | InputError]]:
    """Run the checks that need only `known` (and any of `about`, if given), and yield each that fails with its error."""
    for each in RULES:
        if each.needs in known and (about is None or each.needs & about):
            try:
                each.check(facts)
            except (UserError, InputError) as error:
                yield each, error


def check(facts: Facts, known: Needs, about: Needs | None = None) -> None:
    """Raise UserError for the first mistake and for those that `find_more_mistakes` finds. If a mistake is in a layout, search for layouts
    that work and name them."""
    first = next(find_mistakes(facts, known, about), None)
    if first is None:
        return
    errors: list[UserError] = []
    for error in (first[1], *find_more_mistakes(facts, first[0], known, about)):
        try:
            with as_user_error():
                if isinstance(error, GeometryError) and not errors:
                    raise add_layout_hints(error, facts.model, facts.layout, facts.engine, facts.contract.format_of)
                raise error
        except UserError as shown:
            errors.append(shown)
    raise UserError.join(list({error.field: error for error in reversed(errors)}.values())[::-1])


def find_more_mistakes(facts: Facts, first: Rule, known: Needs, about: Needs | None = None) -> list[UserError | InputError]:
    """Return the mistakes that checks after `first` find without files, devices, or workers. Such a check may rely on what `first` refused,
    so its other errors say nothing."""
    found: list[UserError | InputError] = []
    for each in RULES[RULES.index(first) + 1 :]:
        if each.needs in known & ALONE and (about is None or each.needs & about):
            try:
                each.check(facts)
            except (UserError, InputError) as error:
                found.append(error)
            except Exception:
                continue
    return found


def check_run(config: Config, known: Needs = TRAIN) -> Layout:
    """Check the run of this process and return the trainer's layout. Raise UserError for a mistake. Not collective. With several ranks,
    slow checks are left to `check_on_rank_0`."""
    facts = Facts.here(config, hf_config=read_config(config.model.folder), path=config.model.path)
    check(facts, known if facts.ranks == 1 else known & ~RANK_0)
    return facts.layout


def check_on_rank_0(config: Config, known: Needs = TRAIN) -> None:
    """Run the checks that `check_run` skips. Call this on rank 0 only, once its UserError can be sent to the other ranks."""
    facts = Facts.here(config, hf_config=read_config(config.model.folder), path=config.model.path)
    if facts.ranks > 1:
        check(facts, known, about=RANK_0)


def check_pinned(pinned: Path, asked: Path) -> Path:
    """Return `pinned`. Raise RunError unless it is a commit of the model `asked`: another program may have written into the store."""
    expected = HubModel.parse(asked)
    with suppress(ValueError):
        model = HubModel.parse(pinned)
        if model and expected and model.is_pinned:
            commit = expected.revision if expected.is_pinned else model.revision
            if model == (expected.repository, commit):
                return pinned
    raise RunError(f"the launcher's store names {str(pinned)!r} for model.path = {str(asked)!r}, so another program has written to it")


def pin_model(config: Config) -> Config:
    """Return the configuration with a hub model pinned to a commit, after downloading its config.json and tokenizer to this machine.

    A configuration with a local model is returned unchanged. Collective if several ranks were started; call this before the process group
    exists, and before any check. Raise UserError on all ranks if the model is not available.
    """
    if HubModel.parse(config.model.path) is None:
        return config
    if read_launch().size == 1:
        path = pin_hub_model(config.model.path)
    else:
        from megatron_rl.distributed.launch_store import share_before_start  # imports torch, which `plan` does not need

        shared = share_before_start("model.path", lambda: pin_hub_model(config.model.path), Path)
        path = pin_hub_model(check_pinned(shared, config.model.path))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
