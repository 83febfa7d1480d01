"""Orders of a set's problems: shuffled epochs, and epochs that are filtered and sorted by difficulty.

In shuffled epochs, the position alone determines the problem. A difficulty epoch is created when its first problem is drawn, from the pass
rates known at that time. A checkpoint stores the rates and all epochs that may be drawn from again, so a resumed run draws what an
uninterrupted run would draw. Rates are recorded when the trainer takes the groups of a step, in the order of the steps.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.config.data import TrainDataSourceConfig
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

_log = logging.getLogger(__name__)
_UNKNOWN_RATE = 0.5  # sorts problems without a pass rate


@dataclass(frozen=True)
class ProblemOrder:
    """An endless order of problems."""

    at: Callable[[int], Problem]  # returns the problem at a position, from 0
    fingerprint: str  # identifies the problems and their order
    epochs: DifficultyEpochs | None = None  # the state of the order, if it depends on more than the position


def compute_fingerprint(*parts: object) -> str:
    """Return a short hash of everything that determines an order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()[:16]


def shuffle_epochs(problems: Sequence[Problem], seed: int | str) -> ProblemOrder:
    """Return endless epochs over `problems`, which must not be empty. Each epoch is shuffled differently."""
    orders: dict[int, list[int]] = {}  # only the current epoch

    def problem_at(position: int) -> Problem:
        epoch, index = divmod(position, len(problems))
        if epoch not in orders:
            orders.clear()
            orders[epoch] = random.Random(f"{seed}/epoch/{epoch}").sample(range(len(problems)), len(problems))
        return problems[orders[epoch][index]]

    return ProblemOrder(problem_at, compute_fingerprint(seed, *((problem.prompt, problem.answer) for problem in problems)))


def order_by_difficulty(problems: Sequence[Problem], source: TrainDataSourceConfig, seed: str) -> ProblemOrder:
    """Return the order of `DifficultyEpochs`. Raise UserError like `check_difficulty`."""
    epochs = DifficultyEpochs(problems, source, seed)
    settings = source.curriculum, source.pass_rate, source.pass_rate_low, source.pass_rate_high, source.recheck_every
    facts = ((problem.prompt, problem.answer, problem.level, problem.pass_rate) for problem in problems)
    return ProblemOrder(epochs.at, compute_fingerprint(seed, settings, *facts), epochs)


class _Epoch(NamedTuple):
    number: int
    start: int  # position of the first problem
    order: np.ndarray  # int32 [problems]: indices into the set

    @property
    def end(self) -> int:
        return self.start + len(self.order)


class DifficultyEpochs:
    """Endless epochs of the problems whose pass rate is within the source's bounds, sorted by the source's curriculum."""

    def __init__(self, problems: Sequence[Problem], source: TrainDataSourceConfig, seed: str) -> None:
        """Raise UserError like `check_difficulty`."""
        check_difficulty(problems, source)
        self.label, self._problems, self._source, self._seed = source.label, problems, source, seed
        self._indices = {problem.id: index for index, problem in enumerate(problems)}
        self._rates = _collect_rates(problems)
        self._epochs: list[_Epoch] = []  # the newest, and earlier ones that may be drawn from again

    def at(self, position: int) -> Problem:
        """Return the problem at a position, which must not precede the epochs in memory."""
        while not self._epochs or position >= self._epochs[-1].end:
            self._epochs.append(self._make_epoch())
        epoch = next(epoch for epoch in reversed(self._epochs) if position >= epoch.start)
        return self._problems[epoch.order[position - epoch.start]]

    @property
    def left_out(self) -> int:
        """Number of problems that the newest epoch excludes."""
        return len(self._problems) - len(self._epochs[-1].order) if self._epochs else 0

    @property
    def measures(self) -> bool:
        """Whether `observe` has an effect."""
        return self._source.pass_rate == "measured"

    def observe(self, rates: Mapping[str, float]) -> None:
        """Record measured pass rates by problem id for future epochs, if the source uses them. Ids of other sets are ignored."""
        if self.measures:
            known = {index: rate for name, rate in rates.items() if (index := self._indices.get(name)) is not None}
            self._rates = self._rates.copy()  # a snapshot may refer to the old array
            self._rates[[*known]] = [*known.values()]

    def snapshot(self, needed: int) -> Callable[[], dict[str, Any]]:
        """Return a function that serializes the current state for JSON. Forget epochs that end before position `needed`."""
        self._epochs = [epoch for epoch in self._epochs if epoch.end > needed] or self._epochs[-1:]
        rates, epochs = self._rates, self._epochs.copy()
        return lambda: {"rates": _encode(rates), "epochs": [[epoch.number, epoch.start, _encode(epoch.order)] for epoch in epochs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = _decode(state["rates"], np.float32)
        self._epochs = [_Epoch(number, start, _decode(order, np.int32)) for number, start, order in state["epochs"]]

    def _make_epoch(self) -> _Epoch:
        number, start = (self._epochs[-1].number + 1, self._epochs[-1].end) if self._epochs else (0, 0)
        source, within = self._source, _are_within_bounds(self._rates, self._source)
        if source.recheck_every and number % source.recheck_every == 0:
            within[:] = True
        elif not within.any():
            text = "data.train (%s): no pass rate is within the bounds %s any more, so epoch %d contains all problems"
            _log.warning(text, source.label, _format_bounds(source), number)
            within[:] = True
        indices: list[int] = np.flatnonzero(within).tolist()
        order = random.Random(f"{self._seed}/epoch/{number}").sample(indices, len(indices))
        if source.curriculum == "level":
            order.sort(key=lambda index: self._problems[index].level)
        elif source.curriculum == "pass_rate":
            rates = np.nan_to_num(self._rates, nan=_UNKNOWN_RATE)
            order.sort(key=lambda index: -rates[index])
        return _Epoch(number, start, np.array(order, np.int32))


def check_difficulty(problems: Sequence[Problem], source: TrainDataSourceConfig) -> None:
    """Raise UserError if a set lacks the levels or pass rates that its source uses, or if no problem is within the bounds."""
    if source.curriculum == "level" and len({problem.level for problem in problems}) == 1:
        rule = f"has a curriculum by level, but all of its problems have level {problems[0].level}"
        raise UserError("data.train", source.source, rule, 'set columns.level, or curriculum = "pass_rate"')
    rates = _collect_rates(problems)
    if source.pass_rate == "column" and source.needs_pass_rates and np.isnan(rates).all():
        fix = 'set columns.pass_rate, or pass_rate = "measured"'
        raise UserError("data.train", source.source, "uses pass rates, but no row has one", fix)
    if not _are_within_bounds(rates, source).any():
        raise UserError("data.train", source.source, f"has no problem with a pass rate from {_format_bounds(source)}", "widen the bounds")


def _collect_rates(problems: Sequence[Problem]) -> np.ndarray:
    """Return float32 [problems], NaN if unknown."""
    return np.array([np.nan if problem.pass_rate is None else problem.pass_rate for problem in problems], np.float32)


def _are_within_bounds(rates: np.ndarray, source: TrainDataSourceConfig) -> np.ndarray:
    """Return bool [problems]. Unknown rates are within the bounds."""
    within: np.ndarray = ~((rates < np.float32(source.pass_rate_low)) | (rates > np.float32(source.pass_rate_high)))
    return within


def _format_bounds(source: TrainDataSourceConfig) -> str:
    return f"{source.pass_rate_low:g} to {source.pass_rate_high:g}"


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _decode(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
