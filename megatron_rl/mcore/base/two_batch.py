"""Two micro-batches that take turns on a rank: while one waits for other ranks, the other one computes.

The forward pass of a micro-batch runs in a greenlet and yields during communication (`mcore.base.exchange`). Both form one step of
Megatron's schedule with a single backward pass. Autograd runs it in the reverse order of the forward passes, so turns alternate there too.

Sequence parallelism communicates around every block, with little computation in between. There, a turn is also given between the two
halves of a block, and the second micro-batch starts one turn late, so that one communicates while the other computes a block:

    first     half 1           half 2, scatter             norm, gather               half 1
    second            norm, gather            half 1                 half 2, scatter          norm, gather

The results are those of sequential micro-batches. The second micro-batch runs first, so that gradients are added in the sequential order.
Autograd must not add the two gradients of a weight, since it would round their sum (`mcore.base.weight_gradient`).
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet
from megatron.core.tensor_parallel import get_cuda_rng_tracker

T = TypeVar("T")

_turn: int | None = None  # number of the micro-batch whose turn it is


def run_in_turns(passes: Sequence[Callable[[], T]], late: bool) -> list[T]:
    """Run the forward passes of one or two micro-batches, the last one first; return their results. `late` delays the other micro-batch by
    one turn."""
    global _turn
    assert _turn is None and len(passes) <= 2, "two micro-batches take turns"
    results: dict[int, T] = {}

    def run(number: int) -> None:
        results[number] = passes[number]()

    under_way = {number: greenlet(run) for number in reversed(range(len(passes)))}
    try:
        with get_cuda_rng_tracker().fork():  # Megatron's own forks check that no other fork overlaps them
            for turn in count():
                for number, each in list(under_way.items())[: 1 if late and turn == 0 else None]:
                    _turn = number
                    each.switch(*([] if each else [number]))  # the first switch passes the argument of `run`
                    if each.dead:
                        del under_way[number]
                if not under_way:
                    break
    finally:
        _turn = None
    return [results[number] for number in range(len(passes))]


def give_turn() -> None:
    """Let the other micro-batch continue, if there is one."""
    if _turn is not None:
        getcurrent().parent.switch()


def is_under_way() -> bool:
    """Return whether `run_in_turns` is running."""
    return _turn is not None


def get_turn() -> int:
    """Return the number of the micro-batch whose turn it is, or 0 without turns."""
    return _turn or 0


class PerMicroBatch:
    """An attribute with a separate value per micro-batch in `run_in_turns`. None until it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{name}_of_micro_batches"

    def __get__(self, instance: Any, owner: type) -> Any:
        return vars(instance).get(self._name, {}).get(get_turn())

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance).setdefault(self._name, {})[get_turn()] = value
