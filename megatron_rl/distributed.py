"""Work that only rank 0 does: its result or its error reaches every rank, so that none waits for a dead one."""

from __future__ import annotations

import datetime
import functools
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_rl.errors import MegatronRLError, RunError, as_run_error

_LONGEST_WAIT = datetime.timedelta(hours=1)
"""Of a rank for what rank 0 does before the start."""

T = TypeVar("T")
ObjectT = TypeVar("ObjectT", covariant=True)


def get_rank() -> int:
    """Return this process's rank; 0 in a world of one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank0() -> bool:
    """Return whether this is rank 0; True in a world of one process as well."""
    return get_rank() == 0


def run_on_rank0(call: Callable[[], T]) -> T:
    """Run `call` on rank 0 and return its (picklable) result on every rank; an expected error is raised on every rank. Collective."""
    outcome: list[object] = [None, None]
    if is_rank0():
        try:
            outcome[0] = call()
        except MegatronRLError as error:
            outcome[1] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[1], MegatronRLError):
        raise outcome[1]
    return outcome[0]  # type: ignore[return-value]


def write_on_rank0(work: Callable[[], T]) -> T:
    """`run_on_rank0` of what touches the disk: its OSError becomes a RunError. Collective."""

    def attempt() -> T:
        with as_run_error():
            return work()

    return run_on_rank0(attempt)


def share_before_start(key: str, call: Callable[[], T], store: dist.Store | None = None) -> T:
    """`run_on_rank0` of a launch whose process group is not there yet: through the launcher's store, on which the group is built later.

    `key` names the result, once a launch; `store`: another than the launcher's. Raise RunError where a rank is gone.
    """
    store = store or _open_launch_store()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if rank == 0:
            outcome = _try(call)
            store.set(key, pickle.dumps(outcome).hex())
            store.wait([f"{key}/read/{other}" for other in range(1, size)])  # the store may end with this process
        else:
            outcome = pickle.loads(bytes.fromhex(store.get(key).decode()))
            store.set(f"{key}/read/{rank}", "")
    except dist.DistError as error:
        raise to_run_error(error) or error from error
    if isinstance(outcome, MegatronRLError):
        raise outcome
    return cast(T, outcome)


@functools.cache
def _open_launch_store() -> dist.Store:
    """Return the store of MASTER_ADDR and MASTER_PORT. It stays open: the process group opens the same one."""
    store, _, _ = next(dist.rendezvous("env://", timeout=_LONGEST_WAIT))
    return dist.PrefixStore("megatron-rl", store)


def _try(call: Callable[[], T]) -> T | MegatronRLError:
    try:
        return call()
    except MegatronRLError as error:
        return error


class Rank0(Generic[ObjectT]):
    """An object that exists on rank 0 only, such as the engines or the run's log; every rank holds the `Rank0`."""

    def __init__(self, make: Callable[[], ObjectT]) -> None:
        """Make the object on rank 0; an expected error of `make` is raised on every rank. Collective."""
        self._objects: list[ObjectT] = []
        run_on_rank0(lambda: self._objects.append(make()))

    @property
    def value(self) -> ObjectT:
        """The object, for code that only rank 0 runs. Raises LookupError on other ranks."""
        return self._objects[0]

    def take(self) -> ObjectT:
        """Return the object and release it, so that its memory can be freed. Raises IndexError on other ranks than 0."""
        return self._objects.pop()

    def run(self, call: Callable[[ObjectT], T]) -> T:
        """Return the (picklable) result of `call(object)` on every rank; an expected error is raised on every rank. Collective."""
        return run_on_rank0(lambda: call(self.value))

    def tell(self, call: Callable[[ObjectT], object]) -> None:
        """Do `call(object)` on rank 0, which no other rank waits for; an error is raised there alone."""
        for held in self._objects:
            call(held)


def get_rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) where there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_from_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the (picklable) value of every rank, or every one of `group`, in order. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return cast(list[T], values)


def raise_on_all_ranks(error: MegatronRLError | None) -> None:
    """Raise the first rank's error on all ranks; each rank passes its own error, or None. Collective."""
    for rank_error in gather_from_ranks(error):
        if rank_error is not None:
            raise rank_error


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Run the block on every rank; raise the first rank's expected error on all of them. Collective."""
    caught = None
    try:
        yield
    except MegatronRLError as error:
        caught = error
    raise_on_all_ranks(caught)


def to_run_error(error: BaseException) -> RunError | None:
    """Return the error to show if `error` is how torch reports that another rank is gone, or that memory is short; None for any other."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in line):
        asked = re.search(r"allocate ([\d.]+ \w+)", line)
        fix = "lower train.micro_batch_tokens, recompute, or cut the model over more ranks: see megatron-rl plan"
        return RunError(f"rank {get_rank()} is out of memory{f', which lacks {asked[1]}' if asked else ''}; {fix}")
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return RunError(f"another trainer rank is gone ({line}); checkpoint.resume=auto goes on from the last checkpoint")
    return None
