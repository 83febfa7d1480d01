"""The endless stream of training problems, and the mixture of several sets.

The state of the stream is one counter, plus the positions below it that were drawn but not trained on, so a resumed run trains on exactly
the problems that the interrupted run had not trained on. Filters and curricula add the state of their epochs (`orders`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_rl.data.orders import DifficultyEpochs, ProblemOrder, compute_fingerprint
from megatron_rl.errors import UserError, as_run_error
from megatron_rl.types import Problem


class ProblemStream:
    """Draws the problems of an order. A fingerprint prevents applying a saved position to other data."""

    def __init__(self, order: ProblemOrder, shares: Mapping[DifficultyEpochs, float] | None = None) -> None:
        """`shares`: share in the stream of each set whose epochs have state."""
        self._order, self._position, self._shares = order, 0, shares or {}
        self.templates: dict[str, str] = {}  # fingerprint of each part of the prompts' format, by the field that decides it
        self._left_out: list[int] = []  # positions below `_position` that are to be drawn again, ascending

    def draw(self, n: int, most_again: int | None = None) -> dict[int, Problem]:
        """Return the next `n` problems by ascending position: at most `most_again` that were given back, then new ones. Raise RunError if a
        generator of the user's own fails."""
        count = n if most_again is None else min(n, most_again)
        again, self._left_out = self._left_out[:count], self._left_out[count:]
        first, self._position = self._position, self._position + n - len(again)
        with as_run_error():
            return {position: self._order.at(position) for position in (*again, *range(first, self._position))}

    @property
    def fingerprint(self) -> str:
        """Identifies the problems and their order."""
        return self._order.fingerprint

    def next_batch(self, n: int) -> list[Problem]:
        """Return the next `n` problems."""
        return [*self.draw(n).values()]

    @property
    def left_out_count(self) -> int:
        """Number of problems that were given back and are drawn before new ones."""
        return len(self._left_out)

    def give_back(self, positions: Iterable[int]) -> None:
        """Return positions to the stream that were drawn but not trained on. The next `draw` starts with them."""
        self._left_out = sorted([*self._left_out, *positions])

    @property
    def measures(self) -> bool:
        """Whether `observe` has an effect."""
        return any(epochs.measures for epochs in self._shares)

    def observe(self, rates: Mapping[str, float]) -> None:
        """Record measured pass rates by problem id for future epochs."""
        for epochs in self._shares:
            epochs.observe(rates)

    @property
    def left_out_by_set(self) -> dict[str, int]:
        """Number of problems that the newest epoch excludes, by the label of each set with a filter or curriculum."""
        return {epochs.label: epochs.left_out for epochs in self._shares}

    def state_dict(self, untrained: Iterable[int] = ()) -> dict[str, Any]:
        """Return the JSON-serializable state for a checkpoint, as if the positions `untrained` had not been drawn."""
        return self.snapshot(untrained)()

    def snapshot(self, untrained: Iterable[int] = ()) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the `state_dict` of this moment at any later time. The state can have megabytes."""
        position, left_out = self._position, sorted([*self._left_out, *untrained])
        while left_out and left_out[-1] == position - 1:
            position = left_out.pop()
        state: dict[str, Any] = {"position": position, "fingerprint": self.fingerprint}
        if self.templates:
            state["templates"] = self.templates
        if left_out:
            state["left_out"] = left_out
        if not self._shares:
            return lambda: state
        first = min([position, *left_out])  # the position within a set differs from its share of this by less than 1
        parts = {epochs.label: epochs.snapshot(int(first * share) - 1) for epochs, share in self._shares.items()}
        return lambda: {**state, "epochs": {label: make() for label, make in parts.items()}}

    def load_state_dict(self, state: dict[str, Any], may_differ: bool = False) -> None:
        """Continue from a saved state. If it comes from a stream of other data, raise UserError, or with `may_differ`, keep only its
        position."""
        same = state["fingerprint"] == self.fingerprint
        if not same and not may_differ:
            rule = "the checkpoint was trained on other problems or in another order"
            raise UserError("data", None, rule, "resume with the same data section and the same files")
        self._position, self._left_out = int(state["position"]), list(state.get("left_out", ()))
        for epochs in self._shares if same else ():
            epochs.load_state_dict(state["epochs"][epochs.label])


def mix_orders(orders: Sequence[ProblemOrder], weights: Sequence[float]) -> ProblemStream:
    """Return a stream that interleaves `orders` in proportion to `weights`, which must be positive. Each set keeps its own order."""
    interleaver = WeightedInterleaver(weights)

    def problem_at(position: int) -> Problem:
        index, own_position = interleaver.locate(position)
        return orders[index].at(own_position)

    order = ProblemOrder(problem_at, compute_fingerprint(*weights, *(order.fingerprint for order in orders)))
    return ProblemStream(order, {each.epochs: weight / sum(weights) for each, weight in zip(orders, weights, strict=True) if each.epochs})


class WeightedInterleaver:
    """Assigns the positions 0, 1, 2, ... to sets in proportion to weights.

    After any n positions, the count of each set differs from n times its share by less than 1, so every batch contains the mixture. Among
    the sets that would not exceed their share, the next position goes to the set that reaches its share first (R. Tijdeman, The chairman
    assignment problem, Discrete Mathematics 32, 1980). Moving forward takes a few seconds per million positions; moving backward restarts.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = [weight / sum(weights) for weight in weights]
        self._counts, self._position = [0] * len(weights), 0

    def locate(self, position: int) -> tuple[int, int]:
        """Return the index of the set at `position`, and the number of earlier positions of that set."""
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
