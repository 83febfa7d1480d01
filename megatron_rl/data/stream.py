"""The endless stream of train problems, whose order is a function of the position alone.

The stream's whole state is one counter, and the positions below it that were drawn ahead and not trained on; so a resumed run trains on
exactly the problems that the interrupted one had not. Filters and curricula add the state of their epochs (`epochs`).
A mixture of sets adds no state: `WeightedInterleaver` computes which set a position belongs to and how many of its problems came before,
and each set passes through its own shuffled epochs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.errors import UserError
from megatron_rl.types import Problem


class StatefulEpochs(Protocol):
    """Epochs that follow from pass rates measured in the run; `megatron_rl.data.epochs.DifficultyEpochs`."""

    label: str

    @property
    def left_out(self) -> int: ...

    @property
    def measures(self) -> bool: ...

    def observe(self, rates: Mapping[str, float]) -> None: ...

    def snapshot(self, needed: int) -> Callable[[], dict[str, Any]]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class ProblemOrder:
    """An endless order of problems: `at(n)` is the n-th, from 0; `fingerprint` identifies the problems and their order."""

    at: Callable[[int], Problem]
    fingerprint: str
    epochs: StatefulEpochs | None = None
    """Its state, if it has any beside the position."""


class ProblemStream:
    """Draws the problems of an order; the fingerprint keeps a saved position from being applied to other data."""

    def __init__(self, order: ProblemOrder, shares: Mapping[StatefulEpochs, float] | None = None) -> None:
        """`shares`: of the sets in the order that have epochs with a state."""
        self._order, self._position, self._shares = order, 0, shares or {}
        self._left_out: list[int] = []  # below the position and not yet drawn, ascending

    def draw(self, n: int, most_again: int | None = None) -> dict[int, Problem]:
        """Return the next `n` problems by their positions, which ascend: first those left out, `most_again` at most, then new ones."""
        count = n if most_again is None else min(n, most_again)
        again, self._left_out = self._left_out[:count], self._left_out[count:]
        first, self._position = self._position, self._position + n - len(again)
        return {position: self._order.at(position) for position in (*again, *range(first, self._position))}

    @property
    def left_out_count(self) -> int:
        """Problems that the next `draw` returns before others: of an earlier draw that did not come to be trained on."""
        return len(self._left_out)

    def give_back(self, positions: Iterable[int]) -> None:
        """Make the next `draw` return these again."""
        self._left_out = sorted([*self._left_out, *positions])

    @property
    def measures(self) -> bool:
        """Whether `observe` changes what is drawn."""
        return any(epochs.measures for epochs in self._shares)

    def observe(self, rates: Mapping[str, float]) -> None:
        """Take pass rates measured of problems, by their ids, for epochs to come."""
        for epochs in self._shares:
            epochs.observe(rates)

    @property
    def left_out_by_set(self) -> dict[str, int]:
        """Problems that the newest epoch leaves out, by the label of a set with a filter or a curriculum."""
        return {epochs.label: epochs.left_out for epochs in self._shares}

    def next_batch(self, n: int) -> list[Problem]:
        """Return the next `n` problems."""
        return [*self.draw(n).values()]

    def state_dict(self, untrained: Iterable[int] = ()) -> dict[str, Any]:
        """Return what a checkpoint keeps, JSON-serializable: as if the positions `untrained` had not been drawn."""
        return self.snapshot(untrained)()

    def snapshot(self, untrained: Iterable[int] = ()) -> Callable[[], dict[str, Any]]:
        """Return what makes the `state_dict` of now, at any time later. It copies nothing; what it makes may take megabytes."""
        position, left_out = self._position, sorted([*self._left_out, *untrained])
        while left_out and left_out[-1] == position - 1:
            position = left_out.pop()
        state: dict[str, Any] = {"position": position, "fingerprint": self._order.fingerprint}
        if left_out:
            state["left_out"] = left_out
        if not self._shares:
            return lambda: state
        first = min([position, *left_out])  # a set's own position is within one of its share
        parts = {epochs.label: epochs.snapshot(int(first * share) - 1) for epochs, share in self._shares.items()}
        return lambda: {**state, "epochs": {label: make() for label, make in parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raise UserError when it was taken from a stream over other data."""
        if state["fingerprint"] != self._order.fingerprint:
            rule = "the checkpoint was trained on other problems or in another order"
            raise UserError("data", None, rule, "resume with the same data section and the same files")
        self._position, self._left_out = int(state["position"]), list(state.get("left_out", ()))
        for epochs in self._shares:
            epochs.load_state_dict(state["epochs"][epochs.label])


def mix_orders(orders: Sequence[ProblemOrder], weights: Sequence[float]) -> ProblemStream:
    """Return a stream in which each of `orders` has its share in proportion to `weights`, all above 0, and keeps its own order."""
    interleaver = WeightedInterleaver(weights)

    def problem_at(position: int) -> Problem:
        index, own_position = interleaver.locate(position)
        return orders[index].at(own_position)

    order = ProblemOrder(problem_at, compute_fingerprint(*weights, *(order.fingerprint for order in orders)))
    return ProblemStream(order, {each.epochs: weight / sum(weights) for each, weight in zip(orders, weights, strict=True) if each.epochs})


class WeightedInterleaver:
    """Deals the positions 0, 1, 2... out to sets in proportion to weights, evenly: after any n positions each set has had the whole
    number just below or just above n times its share, so every batch holds the mixture.

    Of the sets that would not exceed their share, the next position goes to the one that reaches its share first (bound: R. Tijdeman, The
    chairman assignment problem, Discrete Mathematics 32, 1980). Only counts are kept: moving forward costs a few seconds per million
    positions, moving backward starts over.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = [weight / sum(weights) for weight in weights]
        self._counts, self._position = [0] * len(weights), 0

    def locate(self, position: int) -> tuple[int, int]:
        """Return (set, how many earlier positions it had) of `position`."""
        if len(self._shares) == 1:
            return 0, position
        if position < self._position:
            self._counts, self._position = [0] * len(self._counts), 0
        while self._position < position:
            self._counts[self._next()] += 1
            self._position += 1
        chosen = self._next()
        return chosen, self._counts[chosen]

    def _next(self) -> int:
        candidates = [
            ((count + 1) / share, index)
            for index, (count, share) in enumerate(zip(self._counts, self._shares, strict=True))
            if count < (self._position + 1) * share
        ]
        return min(candidates)[1]


def shuffle_epochs(problems: Sequence[Problem], seed: int | str) -> ProblemOrder:
    """Return endless passes through `problems`, each in another order; `problems` must not be empty."""
    orders: dict[int, list[int]] = {}  # the current epoch only

    def problem_at(position: int) -> Problem:
        epoch, index = divmod(position, len(problems))
        if epoch not in orders:
            orders.clear()
            orders[epoch] = random.Random(f"{seed}/epoch/{epoch}").sample(range(len(problems)), len(problems))
        return problems[orders[epoch][index]]

    return ProblemOrder(problem_at, compute_fingerprint(seed, *((problem.prompt, problem.answer) for problem in problems)))


def compute_fingerprint(*parts: object) -> str:
    """Return a short hash of what decides a stream's order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()[:16]
