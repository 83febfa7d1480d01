"""Collectives of a rank whose peers do not exist: checked as NCCL checks them, recorded, and answered as if all ranks had the same data.

Python objects and bytes are exchanged in the same way, with two exceptions. Only the last pipeline stage knows the loss, and in a
checkpoint every rank names other parts (`answer_for_others`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup

from megatron_rl import distributed
from megatron_rl.rehearsal.device import FakeGpu, set_value, value_of
from megatron_rl.rehearsal.groups import RefusedCollectiveError, check_group, name_group
from megatron_rl.rehearsal.recorder import Recorder, find_line
from megatron_rl.rehearsal.traffic import count_bytes

host_groups: set[ProcessGroup] = set()
"""Groups that exchange host tensors."""
_reduce_operations: list[Any] = [dist.ReduceOp.SUM]
"""The operation of the current all-reduce, which is not visible in its arguments."""


def communicate(gpu: FakeGpu, func: Any, args: tuple) -> Any:
    """Answer an operator of `torch.ops.c10d`."""
    name = func._schema.name.removeprefix("c10d::").rstrip("_")
    result, kind, group, tensors = _CALLS[name](args)
    ranks = dist.get_process_group_ranks(group)
    if group in host_groups:
        return func(*args)
    for tensor in tensors:
        if tensor.device.type != "cuda":
            raise RefusedCollectiveError(f"{kind} of a tensor on the {tensor.device.type}: NCCL needs it on the GPU")
        if not tensor.is_contiguous():
            raise RefusedCollectiveError(f"{kind} of a tensor {list(tensor.shape)} that is not contiguous")
    if dist.get_rank() not in ranks:
        raise RefusedCollectiveError(f"{kind} in a group of ranks {ranks}, which rank {dist.get_rank()} is not in")
    wait = gpu.recorder.collective(kind, name_group(group), sum(map(count_bytes, tensors)), ranks)
    check_group(kind, group)
    if kind == "barrier":
        gpu.recorder.wait("barrier")
    _works.append(_Work(wait))
    work = _works[-1].boxed()
    return work if result is None else (result, work)


class _Work(dist.Work):
    """A collective that is done at once. Reports when it is waited for."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, *_: Any) -> bool:
        self._on_wait()
        return True

    def get_future(self) -> Any:
        return FakeWork().get_future()


_works: list[_Work] = []
"""Keeps works alive: torch forgets their class once Python drops its last reference."""

Answer = tuple[Any, str, ProcessGroup, list[torch.Tensor]]
"""(result of the operator in addition to its work, kind, group, tensors that are sent or received)"""


def _all_reduce(args: tuple) -> Answer:
    tensors, group = args[0], ProcessGroup.unbox(args[1])
    if _reduce_operations[-1] == dist.ReduceOp.SUM:
        for tensor in tensors:
            if (value := value_of(tensor)) is not None:
                value.mul_(group.size())
    return tensors, "all-reduce", group, list(tensors)


def _all_gather(args: tuple) -> Answer:
    whole, part, group = args[0], args[1], ProcessGroup.unbox(args[2])
    _check_parts("all-gather", whole, part, group)
    value = value_of(part)
    set_value(whole, None if value is None else value.reshape(-1).repeat(group.size()).view(whole.shape))
    return whole, "all-gather", group, [whole]


def _reduce_scatter(args: tuple) -> Answer:
    part, whole, group = args[0], args[1], ProcessGroup.unbox(args[2])
    _check_parts("reduce-scatter", whole, part, group)
    set_value(part, None)
    return part, "reduce-scatter", group, [whole]


def _check_parts(kind: str, whole: torch.Tensor, part: torch.Tensor, group: ProcessGroup) -> None:
    if whole.numel() != part.numel() * group.size() or whole.dtype != part.dtype:
        rule = f"{list(whole.shape)} {whole.dtype} for {group.size()} parts {list(part.shape)} {part.dtype}"
        raise RefusedCollectiveError(f"{kind} in {name_group(group)}: {rule}")


def _coalesced(single: Callable[[tuple], Answer]) -> Callable[[tuple], Answer]:
    def answer(args: tuple) -> Answer:
        found = [single((out, into, args[2])) for out, into in zip(args[0], args[1], strict=True)]
        return None, found[0][1], found[0][2], [tensor for *_, tensors in found for tensor in tensors]

    return answer


def _all_gather_list(args: tuple) -> Answer:
    parts, (own,), group = args[0][0], args[1], ProcessGroup.unbox(args[2])
    for part in parts:
        if part.numel() != own.numel():
            raise RefusedCollectiveError(f"all-gather in {name_group(group)}: parts {list(part.shape)}, own {list(own.shape)}")
        set_value(part, value_of(own))
    return args[0], "all-gather", group, list(parts)


def _reduce_scatter_list(args: tuple) -> Answer:
    (own,), parts, group = args[0], args[1][0], ProcessGroup.unbox(args[2])
    if len(parts) != group.size() or parts[group.rank()].shape != own.shape:
        shapes = f"parts {[list(part.shape) for part in parts]}, own {list(own.shape)}"
        raise RefusedCollectiveError(f"reduce-scatter in {name_group(group)}: {shapes}")
    set_value(own, None)
    return args[0], "reduce-scatter", group, list(parts)


def _all_to_all(args: tuple) -> Answer:
    into, source, group, into_splits, splits = args[0], args[1], ProcessGroup.unbox(args[2]), args[3], args[4]
    for tensor, sizes in ((into, into_splits), (source, splits)):
        length = tensor.shape[0] if tensor.dim() else 1
        if (sum(sizes) != length or len(sizes) != group.size()) if sizes else length % group.size():
            rule = f"{length} rows are not {list(sizes) or f'{group.size()} equal parts'}"
            raise RefusedCollectiveError(f"all-to-all in {name_group(group)}: {rule}")
    value = value_of(source)
    set_value(into, value.clone() if value is not None and value.shape == into.shape else None)
    return None, "all-to-all", group, [source]


def _message(kind: str) -> Callable[[tuple], Answer]:
    def answer(args: tuple) -> Answer:
        group = ProcessGroup.unbox(args[1])
        if not 0 <= args[2] < group.size():
            raise RefusedCollectiveError(f"{kind}: there is no rank {args[2]} in {name_group(group)}")
        return None, kind, group, list(args[0])

    return answer


_CALLS: dict[str, Callable[[tuple], Answer]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": lambda args: (None, *_all_reduce(args)[1:]),
    "reduce": lambda args: (None, "reduce", ProcessGroup.unbox(args[1]), list(args[0])),
    "broadcast": lambda args: (args[0], "broadcast", ProcessGroup.unbox(args[1]), list(args[0])),
    "_allgather_base": _all_gather,
    "_reduce_scatter_base": _reduce_scatter,
    "allgather_into_tensor_coalesced": _coalesced(_all_gather),
    "reduce_scatter_tensor_coalesced": _coalesced(_reduce_scatter),
    "allgather": _all_gather_list,
    "reduce_scatter": _reduce_scatter_list,
    "alltoall_base": _all_to_all,
    "send": _message("send"),
    "recv": _message("receive"),
    "barrier": lambda args: (None, "barrier", ProcessGroup.unbox(args[1]), []),
}

_sent_by_last_stage: dict[str, list[Any]] = {}
"""Line -> objects that a rank of the last pipeline stage, rehearsed earlier, sent to the other ranks."""
_answers: list[Callable[[Any], Any]] = []
_last_gathered: list[Any] = [None]


@contextmanager
def answer_for_others(answer: Callable[[Any], tuple[Any, Any] | None]) -> Iterator[None]:
    """Context manager that decides what other ranks contribute to an exchange of objects.

    For this rank's object, `answer` returns the object of one other rank and the object of each remaining rank, or None if all are equal.
    """
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.pop()


def install(recorder: Callable[[], Recorder]) -> None:
    """Replace `all_reduce`, to note its operation, the exchange of objects in torch.distributed, and the exchange of bytes in
    `megatron_rl.distributed`."""
    plain_all_reduce = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        _reduce_operations.append(op)
        try:
            return plain_all_reduce(tensor, op, group, async_op)
        finally:
            _reduce_operations.pop()

    def record(kind: str, group: Any) -> str:
        """Record an exchange of objects, and return the group's name."""
        group = group if group is not None else dist.group.WORLD
        recorder().collective(kind, name_group(group), 0)
        check_group(kind, group)
        recorder().wait(kind)
        return name_group(group)

    def gather_from_all(obj: Any, group: Any) -> list[Any]:
        name, size = record("all-gather of objects", group), dist.get_world_size(group)
        gathered = _ask_all(obj, size, dist.get_rank(group))
        if size > 1 and name.startswith("pp "):
            sent = _sent_by_last_stage.setdefault(find_line(), [])
            if dist.get_rank(group) == size - 1:
                sent.append(obj)
            elif sent:
                gathered[-1] = sent[0]
        return gathered

    def all_gather_object(object_list: list, obj: Any, group: Any = None) -> None:
        object_list[:] = gather_from_all(obj, group)

    def gather_bytes(data: bytes, group: Any = None, everywhere: bool = True) -> list[bytes]:
        return gather_from_all(data, group)

    def broadcast_bytes(data: bytes, source: int) -> bytes:
        record("broadcast of objects", None)
        return data or distributed.NOTHING  # what rank 0 would say is not known

    def gather_object(obj: Any, object_gather_list: list | None = None, dst: Any = None, group: Any = None, **_: Any) -> None:
        record("gather of objects", group)
        _last_gathered[0] = obj
        gathered = _ask_all(obj, dist.get_world_size(group), dist.get_rank(group))
        if object_gather_list is not None:
            object_gather_list[:] = gathered

    def scatter_object_list(
        scatter_object_output_list: list, scatter_object_input_list: list | None = None, src: Any = None, group: Any = None, **_: Any
    ) -> None:
        record("scatter of objects", group)
        sent = scatter_object_input_list  # a save plan returns unchanged from rank 0
        scatter_object_output_list[0] = _last_gathered[0] if sent is None else sent[dist.get_rank(group)]

    def broadcast_object_list(object_list: list, *_: Any, group: Any = None, **__: Any) -> None:
        record("broadcast of objects", group)

    for function in (all_reduce, all_gather_object, gather_object, scatter_object_list, broadcast_object_list):
        for module in (dist, dist.distributed_c10d):
            setattr(module, function.__name__, function)
    distributed.gather_bytes, distributed.broadcast_bytes = gather_bytes, broadcast_bytes


def _ask_all(obj: Any, size: int, own: int) -> list[Any]:
    """Return the objects of all ranks."""
    answer = next((found for ask in _answers if (found := ask(obj)) is not None), None)
    if answer is None:
        return [obj] * size
    other, rest = answer
    objects = [rest] * size
    objects[(own + 1) % size] = other
    objects[own] = obj
    return objects
