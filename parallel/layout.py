"""Layouts: how ranks share a model. Imports without torch.

Ranks are ordered as Megatron-Core's parallel_state orders them by default ("tp-cp-ep-dp-pp"). The same ranks are counted twice:

    dense    rank = tp  + TP  * (cp + CP * (dp  + DP  * pp))       attention, dense MLP, embedding, norms
    experts  rank = etp + ETP * (ep + EP * (edp + EDP * pp))       the weights of the experts

so ETP * EP * EDP = TP * CP * DP, and a rank's pipeline stage is the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parallel.shards import GeometryError

_LEAST = {"first_stage_layers": 0, "last_stage_layers": 0}
"""The least value of sizes that may be below 1."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. Example: Layout(tp=2, pp=2) needs a world size of 4.

    Raises GeometryError for a size that is no positive integer, or experts' sizes that do not fit the dense ones.
    """

    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline parallel."""
    vpp: int = 1
    """Virtual stages per pipeline stage; above 1 only with pp above 1."""
    first_stage_layers: int = 0
    """Layers of the first pipeline stage; 0: as many as the others (`parallel.stages`)."""
    last_stage_layers: int = 0
    """The same of the last one."""
    ep: int = 1
    """Expert parallel: ranks that share the experts."""
    etp: int = 0
    """Tensor parallel within an expert; 0 becomes tp, as in Megatron."""
    dp: int = 1
    """Data parallel."""
    cp: int = 1
    """Context parallel."""

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for name, size in vars(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < _LEAST.get(name, 1):
                raise GeometryError(f"train.layout.{name}", size, "must be a positive integer" + ", or 0" * (name in _LEAST))
        for name, least in {"vpp": 1, **_LEAST}.items():
            if (size := getattr(self, name)) > least and self.pp == 1:
                rule, fix = "needs more than one pipeline stage", f"set train.layout.pp above 1, or train.layout.{name} = {least}"
                raise GeometryError(f"train.layout.{name}", size, rule, fix)
        if self.pp == 2 and self.first_stage_layers and self.last_stage_layers:
            rule = "follows from train.layout.first_stage_layers where there are two stages"
            raise GeometryError("train.layout.last_stage_layers", self.last_stage_layers, rule, "leave one out")
        stage_ranks, expert_ranks = self.world_size // self.pp, self.ep * self.etp
        if self.ep > 1 and stage_ranks % expert_ranks:
            rule = f"ep * etp = {self.ep} * {self.etp} must divide tp * cp * dp = {self.tp} * {self.cp} * {self.dp}"
            raise GeometryError("train.layout.ep", self.ep, rule, "set train.layout.etp = 1, or change train.layout.ep or train.layout.dp")
        if stage_ranks % expert_ranks:
            raise GeometryError("train.layout.etp", self.etp, f"must divide tp * cp * dp = {stage_ranks}", "use a divisor of it")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def one_stage(self) -> Layout:
        """The layout of one pipeline stage alone."""
        return replace(self, pp=1, vpp=1, first_stage_layers=0, last_stage_layers=0)

    @property
    def edp(self) -> int:
        """Replicas of every expert's weights in a pipeline stage."""
        return self.world_size // self.pp // (self.ep * self.etp)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`. Raise ValueError outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            sizes = f"tp({self.tp}) * cp({self.cp}) * dp({self.dp}) * pp({self.pp})"
            raise ValueError(f"rank {rank} is outside {sizes} = {self.world_size}")
        stage, stage_rank = divmod(rank, self.world_size // self.pp)
        return Coordinates(
            tp=stage_rank % self.tp,
            cp=stage_rank // self.tp % self.cp,
            dp=stage_rank // (self.tp * self.cp),
            pp=stage,
            etp=stage_rank % self.etp,
            ep=stage_rank // self.etp % self.ep,
            edp=stage_rank // (self.etp * self.ep),
        )


class EngineLayout(NamedTuple):
    """Sizes of equal engines. Rank r of engine e has number e * tp + r."""

    tp: int = 1
    """Ranks of an engine, tensor parallel."""
    ep: int = 1
    """Ranks among them that share the experts."""
    engines: int = 1
    nodes: int = 1
    """Nodes that the ranks of an engine lie over, in order."""


def parse_sizes(option: str, text: str, allowed: Sequence[str]) -> dict[str, int]:
    """Parse `tp=2,pp=2`. Raise GeometryError, with the option's name, for anything but `allowed` names and positive integers."""
    sizes = {name: size for name, _, size in (part.partition("=") for part in text.split(","))}
    if not all(name in allowed and size.isdigit() and int(size) for name, size in sizes.items()):
        raise GeometryError(option, repr(text), f"must be like tp=2; the names are {', '.join(allowed)}", "correct it")
    return {name: int(size) for name, size in sizes.items()}


@dataclass(frozen=True)
class Coordinates:
    """A rank's index in each dimension of a layout; `ep`, `etp` and `edp` are those of the experts' weights."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0
    edp: int = 0


def format_numbers(noun: str, numbers: Sequence[int], dash: str) -> str:
    """Return "ranks 0-2, 5" for the ranks or layers 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}{dash}{run[-1]}" for run in runs)
    return f"{noun}{'s' * (len(numbers) != 1)} {text}"
