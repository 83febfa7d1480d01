"""The endless stream of train problems, whose order is a function of the position alone.

The stream's whole state is one counter, so a resumed run continues with exactly the problems that the broken one would have drawn.
A mixture of sets has no state of its own either: `WeightedInterleaver` says which set a position belongs to and how often that set had
its turn
before, and each set passes through its own shuffled epochs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.types import Problem


@dataclass(frozen=True)
class ProblemOrder:
    """An endless order of problems: `at(n)` is the n-th, from 0; `fingerprint` identifies the problems and their order."""

    at: Callable[[int], Problem]
    fingerprint: str


class ProblemStream:
    """Hands out problems in batches, for ever.

    `problem_at(position)` gives the problem at each position 0, 1, 2...; `fingerprint` identifies the data and its order, so that
    a saved position is never applied to other data.
    """

    def __init__(self, problem_at: Callable[[int], Problem], fingerprint: str) -> None:
        self._problem_at, self._fingerprint = problem_at, fingerprint
        self._position = 0

    def next_batch(self, n: int) -> list[Problem]:
        """The next `n` problems."""
        batch = [self._problem_at(position) for position in range(self._position, self._position + n)]
        self._position += n
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON-serialisable."""
        return {"position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises UserError when it was taken from a stream over other data."""
        if state["fingerprint"] != self._fingerprint:
            rule = "the checkpoint was trained on other problems or in another order"
            raise UserError("data", None, rule, "resume with the same data section and the same files")
        self._position = int(state["position"])


def mix_orders(orders: Sequence[ProblemOrder], weights: Sequence[float]) -> ProblemStream:
    """A stream in which each of `orders` has its share in proportion to `weights`, all above 0, and keeps its own order."""
    turns = WeightedInterleaver(weights)

    def problem_at(position: int) -> Problem:
        index, turn = turns.locate(position)
        return orders[index].at(turn)

    return ProblemStream(problem_at, compute_fingerprint(*weights, *(order.fingerprint for order in orders)))


class WeightedInterleaver:
    """Deals out the positions 0, 1, 2... in proportion to weights, evenly: after any n positions each set has had the whole number
    just below or just above n times its share, so every batch holds the mixture.

    Of the sets that would not get ahead of their share, the one goes first whose next turn is due first. (R. Tijdeman, The chairman
    assignment problem, Discrete Mathematics 32, 1980, has the bound.) Only sums are kept: a position ahead costs its distance, a few
    seconds per million; one behind starts over.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = [weight / sum(weights) for weight in weights]
        self._counts, self._position = [0] * len(weights), 0

    def locate(self, position: int) -> tuple[int, int]:
        """(set, its turns before) of `position`."""
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
        due = [
            ((count + 1) / share, index)
            for index, (count, share) in enumerate(zip(self._counts, self._shares, strict=True))
            if count < (self._position + 1) * share
        ]
        return min(due)[1]


def shuffle_epochs(problems: Sequence[Problem], seed: int | str) -> ProblemOrder:
    """Passes through `problems` again and again, each time in another order; `problems` must not be empty."""
    orders: dict[int, list[int]] = {}  # of the current epoch only

    def problem_at(position: int) -> Problem:
        epoch, index = divmod(position, len(problems))
        if epoch not in orders:
            orders.clear()
            orders[epoch] = random.Random(f"{seed}/epoch/{epoch}").sample(range(len(problems)), len(problems))
        return problems[orders[epoch][index]]

    return ProblemOrder(problem_at, compute_fingerprint(seed, *((problem.prompt, problem.answer) for problem in problems)))


def compute_fingerprint(*parts: object) -> str:
    """A short hash of what decides a stream's order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()[:16]
