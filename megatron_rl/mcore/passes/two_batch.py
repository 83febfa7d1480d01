"""Two micro-batches that take turns on a rank: while one waits for other ranks, the other computes.

A micro-batch's forward pass runs in a greenlet, and gives its turn wherever an exchange with other ranks is under way (`mcore.layers.linear.exchange`).
Both are one step of Megatron's schedule, with one backward pass: autograd runs what is ready in the opposite order of the forward passes,
so that turns alternate there too, and an exchange's gradient travels while the other micro-batch computes.

Sequence parallelism exchanges around every block, with little to compute between two exchanges. There a turn is also given between a
block's two halves, and the second micro-batch begins a turn late, so that one exchanges while the other is in a block:

    first     half 1           half 2, scatter             norm, gather               half 1
    second            norm, gather            half 1                 half 2, scatter          norm, gather

The numbers are those of one micro-batch after the other. The second runs first, so that gradients, in the opposite order, are added as
they would be; a weight's two gradients must not be added by autograd, which would round their sum (`mcore.layers.linear.weight_gradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet
from megatron.core.tensor_parallel import get_cuda_rng_tracker

T = TypeVar("T")

_turn: int | None = None
"""Number of the micro-batch whose turn it is."""


def run_in_turns(passes: Sequence[Callable[[], T]], late: bool) -> list[T]:
    """Run the forward passes of one or two micro-batches; return their results. `late`: the second to run begins a turn late.

    The last one runs first.
    """
    global _turn
    assert _turn is None and len(passes) <= 2, "two micro-batches take turns"
    results: dict[int, T] = {}

    def run(number: int) -> None:
        results[number] = passes[number]()

    under_way = {number: greenlet(run) for number in reversed(range(len(passes)))}
    try:
        with get_cuda_rng_tracker().fork():  # as Megatron's passes do, each of which checks when it ends that no other did
            for turn in count():
                for number, each in list(under_way.items())[: 1 if late and turn == 0 else None]:
                    _turn = number
                    each.switch(*([] if each else [number]))  # an argument begins it
                    if each.dead:
                        del under_way[number]
                if not under_way:
                    break
    finally:
        _turn = None
    return [results[number] for number in range(len(passes))]


def give_turn() -> None:
    """Let the other micro-batch go on, where there is one."""
    if _turn is not None:
        getcurrent().parent.switch()


def is_under_way() -> bool:
    """Return whether the pass under way is `run_in_turns`'s."""
    return _turn is not None


def get_turn() -> int:
    """Return the number of the micro-batch whose turn it is: 0 or 1; 0 without turns."""
    return _turn or 0


class OfMicroBatch:
    """An attribute of which each of two micro-batches under way has its own value; None until it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{name}_of_micro_batches"

    def __get__(self, instance: Any, owner: type) -> Any:
        return vars(instance).get(self._name, {}).get(get_turn())

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance).setdefault(self._name, {})[get_turn()] = value
