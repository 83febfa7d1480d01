"""The collectives of a rank whose peers do not exist: checked as NCCL checks them, counted, and answered as if all ranks had the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup

from megatron_rl.rehearsal.device import FakeGpu, set_value, value_of
from megatron_rl.rehearsal.groups import RefusedCollectiveError, check_group, name_group
from megatron_rl.rehearsal.traffic import count_bytes


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
    name, nbytes = name_group(group), sum(map(count_bytes, tensors))
    wait = gpu.recorder.collective(kind, name, nbytes, ranks)
    check_group(kind, group)
    if kind == "barrier":
        gpu.recorder.wait("barrier")
    _works.append(_Work(wait))
    work = _works[-1].boxed()
    return work if result is None else (result, work)


class _Work(dist.Work):
    """Tells when it is waited for, and is done at once."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def wait(self, *_: Any) -> bool:
        self._tell()
        return True

    def get_future(self) -> Any:
        return FakeWork().get_future()


_works: list[_Work] = []
"""Kept, because torch forgets which class a work has when Python lets go of it."""
host_groups: set[ProcessGroup] = set()
"""Groups that exchange tensors of the host. Each answers as if all ranks had the same."""


def world() -> ProcessGroup:
    """Return the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


operation: list[Any] = [dist.ReduceOp.SUM]
"""What the all-reduce under way does, which its operator does not tell."""

Answer = tuple[Any, str, ProcessGroup, list[torch.Tensor]]
"""(what the operator returns beside its work, kind, group, tensors that are sent or received)"""


def _all_reduce(args: tuple) -> Answer:
    tensors, group = args[0], ProcessGroup.unbox(args[1])
    if operation[-1] == dist.ReduceOp.SUM:
        for tensor in tensors:
            if (value := value_of(tensor)) is not None:
                value.mul_(group.size())
    return tensors, "all-reduce", group, list(tensors)


def _reduce(args: tuple) -> Answer:
    return None, "reduce", ProcessGroup.unbox(args[1]), list(args[0])


def _broadcast(args: tuple) -> Answer:
    return args[0], "broadcast", ProcessGroup.unbox(args[1]), list(args[0])


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


def _coalesced(single: Callable[[tuple], Answer], swapped: bool) -> Callable[[tuple], Answer]:
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
        raise RefusedCollectiveError(
            f"reduce-scatter in {name_group(group)}: parts {[list(part.shape) for part in parts]}, own {list(own.shape)}"
        )
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


def _barrier(args: tuple) -> Answer:
    return None, "barrier", ProcessGroup.unbox(args[1]), []


_CALLS: dict[str, Callable[[tuple], Answer]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": lambda args: (None, *_all_reduce(args)[1:]),
    "reduce": _reduce,
    "broadcast": _broadcast,
    "_allgather_base": _all_gather,
    "_reduce_scatter_base": _reduce_scatter,
    "allgather_into_tensor_coalesced": _coalesced(_all_gather, False),
    "reduce_scatter_tensor_coalesced": _coalesced(_reduce_scatter, True),
    "allgather": _all_gather_list,
    "reduce_scatter": _reduce_scatter_list,
    "alltoall_base": _all_to_all,
    "send": _message("send"),
    "recv": _message("receive"),
    "barrier": _barrier,
}
