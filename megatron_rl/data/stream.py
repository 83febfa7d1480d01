"""The endless stream of train problems, whose order is a function of the position alone.

The stream's whole state is one counter, so a resumed run continues with exactly the problems that the broken one would have drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.types import Problem


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


def shuffled_epochs(problems: Sequence[Problem], seed: int) -> ProblemStream:
    """A stream that passes through `problems` again and again, each time in another order; `problems` must not be empty."""
    orders: dict[int, list[int]] = {}  # of the current epoch only

    def problem_at(position: int) -> Problem:
        epoch, index = divmod(position, len(problems))
        if epoch not in orders:
            orders.clear()
            orders[epoch] = random.Random(f"{seed}/epoch/{epoch}").sample(range(len(problems)), len(problems))
        return problems[orders[epoch][index]]

    return ProblemStream(problem_at, fingerprint(seed, *((problem.prompt, problem.answer) for problem in problems)))


def fingerprint(*parts: object) -> str:
    """A short hash of what decides a stream's order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()[:16]
