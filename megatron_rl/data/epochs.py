"""Epochs that difficulty chooses and orders: filters by pass rate, curricula by level or pass rate.

An epoch of a set is made when its first problem is drawn, of the pass rates known by then; from then on its problems are a function of the
position, as in any other order (`stream`). A checkpoint keeps the epochs that may be drawn from again, and the rates: so a resumed run
draws what the uninterrupted one would have drawn. Rates become known when the trainer takes a step's groups, step by step, and never when
groups happen to end.
"""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.config.data import TrainDataSourceConfig
from megatron_rl.data.stream import ProblemOrder, compute_fingerprint
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

_log = logging.getLogger(__name__)
_UNKNOWN = 0.5
"""The pass rate by which a problem without one is ordered."""


class _Epoch(NamedTuple):
    number: int
    start: int
    """Position of its first problem."""
    order: np.ndarray
    """int32: numbers of its problems in the set."""

    @property
    def end(self) -> int:
        return self.start + len(self.order)


class DifficultyEpochs:
    """Endless passes through a set: of the problems whose pass rate is within the source's bounds, with a curriculum the easiest first."""

    def __init__(self, problems: Sequence[Problem], source: TrainDataSourceConfig, seed: str) -> None:
        """Raise UserError as `check_difficulty`."""
        check_difficulty(problems, source)
        self.label, self._problems, self._source, self._seed = source.label, problems, source, seed
        self._numbers = {problem.id: number for number, problem in enumerate(problems)}
        self._rates = np.array([np.nan if problem.pass_rate is None else problem.pass_rate for problem in problems], np.float32)
        self._epochs: list[_Epoch] = []  # the newest, and those before it that may be drawn from again

    def at(self, position: int) -> Problem:
        """Return the problem of a position that is not before the epochs in memory."""
        while not self._epochs or position >= self._epochs[-1].end:
            self._epochs.append(self._make_epoch())
        epoch = next(epoch for epoch in reversed(self._epochs) if position >= epoch.start)
        return self._problems[epoch.order[position - epoch.start]]

    @property
    def left_out(self) -> int:
        """Problems that are not in the newest epoch."""
        return len(self._problems) - len(self._epochs[-1].order) if self._epochs else 0

    @property
    def measures(self) -> bool:
        """Whether `observe` changes anything."""
        return self._source.pass_rate == "measured"

    def observe(self, rates: Mapping[str, float]) -> None:
        """Take measured pass rates by problem id for the epochs to come, if the source wants them; ids of other sets are passed over."""
        if self.measures:
            known = {number: rate for name, rate in rates.items() if (number := self._numbers.get(name)) is not None}
            self._rates = self._rates.copy()  # a snapshot may hold it
            self._rates[[*known]] = [*known.values()]

    def snapshot(self, needed: int) -> Callable[[], dict[str, Any]]:
        """Return what makes the state that a checkpoint keeps, as of now, JSON-serializable; forget epochs that end before position
        `needed`."""
        self._epochs = [epoch for epoch in self._epochs if epoch.end > needed] or self._epochs[-1:]
        rates, epochs = self._rates, self._epochs.copy()
        return lambda: {"rates": _encode(rates), "epochs": [[epoch.number, epoch.start, _encode(epoch.order)] for epoch in epochs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = _decode(state["rates"], np.float32)
        self._epochs = [_Epoch(number, start, _decode(order, np.int32)) for number, start, order in state["epochs"]]

    def _make_epoch(self) -> _Epoch:
        number, start = (self._epochs[-1].number + 1, self._epochs[-1].end) if self._epochs else (0, 0)
        source = self._source
        within = find_within(self._rates, source)
        if source.recheck_every and number % source.recheck_every == 0:
            within[:] = True
        elif not within.any():
            bounds = f"{source.pass_rate_low:g} to {source.pass_rate_high:g}"
            _log.warning("data.train (%s): no pass rate is from %s any more, so epoch %d has all problems", source.label, bounds, number)
            within[:] = True
        numbers: list[int] = np.flatnonzero(within).tolist()
        order = random.Random(f"{self._seed}/epoch/{number}").sample(numbers, len(numbers))
        if source.curriculum == "level":
            order.sort(key=lambda index: self._problems[index].level)
        elif source.curriculum == "pass_rate":
            rates = np.nan_to_num(self._rates, nan=_UNKNOWN)
            order.sort(key=lambda index: -rates[index])
        return _Epoch(number, start, np.array(order, np.int32))


def order_by_difficulty(problems: Sequence[Problem], source: TrainDataSourceConfig, seed: str) -> ProblemOrder:
    """Return the order of `DifficultyEpochs`. Raise UserError as `check_difficulty`."""
    epochs = DifficultyEpochs(problems, source, seed)
    settings = source.curriculum, source.pass_rate, source.pass_rate_low, source.pass_rate_high, source.recheck_every
    facts = ((problem.prompt, problem.answer, problem.level, problem.pass_rate) for problem in problems)
    return ProblemOrder(epochs.at, compute_fingerprint(seed, settings, *facts), epochs)


def check_difficulty(problems: Sequence[Problem], source: TrainDataSourceConfig) -> None:
    """Raise UserError where a set has no levels or pass rates to go by, or no problem within the bounds."""
    if source.curriculum == "level" and len({problem.level for problem in problems}) == 1:
        rule = f"has a curriculum by level, and all its problems have level {problems[0].level}"
        raise UserError("data.train", source.source, rule, 'name columns.level, or use curriculum = "pass_rate"')
    rates = np.array([np.nan if problem.pass_rate is None else problem.pass_rate for problem in problems], np.float32)
    if source.pass_rate == "column" and source.needs_pass_rates and np.isnan(rates).all():
        fix = 'name columns.pass_rate, or set pass_rate = "measured"'
        raise UserError("data.train", source.source, "goes by pass rates, and no row has one", fix)
    if not find_within(rates, source).any():
        bounds = f"{source.pass_rate_low:g} to {source.pass_rate_high:g}"
        raise UserError("data.train", source.source, f"has no problem with a pass rate from {bounds}", "widen the bounds")


def find_within(rates: np.ndarray, source: TrainDataSourceConfig) -> np.ndarray:
    """Return for each pass rate (float32, NaN where it is unknown) whether the bounds let it in; what is unknown is let in."""
    low, high = np.float32(source.pass_rate_low), np.float32(source.pass_rate_high)
    within: np.ndarray = ~((rates < low) | (rates > high))
    return within


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _decode(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
