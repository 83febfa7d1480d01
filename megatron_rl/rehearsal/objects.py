"""Python objects that ranks exchange, where there is only one: the others have what this one has, but for what is known of them.

The last pipeline stage alone knows the loss, and in a checkpoint every rank names other parts (`others_say`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_rl.rehearsal import collectives, groups
from megatron_rl.rehearsal.recorder import Recorder, find_line

_said_by_last_stage: dict[str, list[Any]] = {}
"""Line -> objects that a rank of the last pipeline stage, rehearsed before, gave to the others."""
_answers: list[Callable[[Any], Any]] = []
_last: list[Any] = [None]
"""What this rank gave to another one last."""


@contextmanager
def others_say(answer: Callable[[Any], tuple[Any, Any] | None]) -> Iterator[None]:
    """Within the context, where this rank says `obj`, `answer(obj)` is what one of the others says, and what each of the rest says; None
    where all say the same."""
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.pop()


def install(recorder: Callable[[], Recorder]) -> None:
    """Replace what exchanges objects in torch.distributed."""

    def count(kind: str, group: Any) -> None:
        group = group if group is not None else collectives.world()
        recorder().collective(kind, groups.name_group(group), 0)
        groups.check_group(kind, group)
        recorder().wait(kind)

    def all_gather_object(object_list: list, obj: Any, group: Any = None) -> None:
        count("all-gather of objects", group)
        size = len(object_list)
        object_list[:] = _ask_all(obj, size, dist.get_rank(group))
        if size > 1 and groups.name_group(group or collectives.world()).startswith("pp "):
            said = _said_by_last_stage.setdefault(find_line(), [])
            if dist.get_rank(group) == size - 1:
                said.append(obj)
            elif said:
                object_list[-1] = said[0]

    def gather_object(obj: Any, object_gather_list: list | None = None, dst: Any = None, group: Any = None, **_: Any) -> None:
        count("gather of objects", group)
        _last[0] = obj
        said = _ask_all(obj, dist.get_world_size(group), dist.get_rank(group))
        if object_gather_list is not None:
            object_gather_list[:] = said

    def scatter_object_list(
        scatter_object_output_list: list, scatter_object_input_list: list | None = None, src: Any = None, group: Any = None, **_: Any
    ) -> None:
        count("scatter of objects", group)
        sent = scatter_object_input_list
        scatter_object_output_list[0] = _last[0] if sent is None else sent[dist.get_rank(group)]  # a plan comes back as it was sent

    def broadcast_object_list(object_list: list, *_: Any, group: Any = None, **__: Any) -> None:
        count("broadcast of objects", group)

    for function in (all_gather_object, gather_object, scatter_object_list, broadcast_object_list):
        for module in (dist, dist.distributed_c10d):
            setattr(module, function.__name__, function)


def _ask_all(obj: Any, size: int, own: int) -> list[Any]:
    answer = next((found for say in _answers if (found := say(obj)) is not None), None)
    if answer is None:
        return [obj] * size
    other, rest = answer
    said = [rest] * size
    said[(own + 1) % size] = other
    said[own] = obj
    return said
