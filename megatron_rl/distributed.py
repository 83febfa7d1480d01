"""Collective helpers: run work on rank 0 and hand its result or error to every rank, so that no rank waits for a dead one."""

import datetime
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_rl.config.launch import read_launch
from megatron_rl.errors import MegatronRLError, RunError, as_run_error, describe_disk_error

_STORE_TIMEOUT = datetime.timedelta(hours=1)  # longest time that a rank waits for rank 0's work before the process group exists

T = TypeVar("T")
ObjectT = TypeVar("ObjectT", covariant=True)


def get_rank() -> int:
    """Return this process's rank, or 0 without a process group."""
    return get_rank_and_size()[0]


def get_rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks, or (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_rank0() -> bool:
    return get_rank() == 0


def run_on_rank0(call: Callable[[], T]) -> T:
    """Run `call` on rank 0, and return its picklable result or raise its `MegatronRLError` on every rank. Collective."""
    outcome: list[object] = [None, None]
    if is_rank0():
        try:
            outcome[0] = call()
        except MegatronRLError as error:
            outcome[1] = error
    if get_rank_and_size()[1] > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[1], MegatronRLError):
        raise outcome[1]
    return cast(T, outcome[0])


def write_on_rank0(work: Callable[[], T]) -> T:
    """Like `run_on_rank0`, for work that writes to disk: an OSError is raised as a RunError. Collective."""

    def attempt() -> T:
        with as_run_error():
            return work()

    return run_on_rank0(attempt)


def share_before_start(key: str, call: Callable[[], T], store: dist.Store | None = None) -> T:
    """Like `run_on_rank0`, but works before the process group exists. Raise RunError if a rank is gone.

    Args:
        key: names the result; may be used once per launch.
        store: replaces the launcher's store, on which the process group is built later.
    """
    store = store or _open_launch_store()
    rank, size = read_launch(joins=True)[:2]
    try:
        if rank == 0:
            try:
                outcome: object = call()
            except MegatronRLError as error:
                outcome = error
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
    """Connect to the store at MASTER_ADDR and MASTER_PORT. It stays open, because the process group opens the same store."""
    store, _, _ = next(dist.rendezvous("env://", timeout=_STORE_TIMEOUT))
    return dist.PrefixStore("megatron-rl", store)


class Rank0(Generic[ObjectT]):
    """A handle, held by every rank, of an object that exists on rank 0 only, such as the engines or the run's log."""

    def __init__(self, make: Callable[[], ObjectT]) -> None:
        """Make the object on rank 0. A `MegatronRLError` of `make` is raised on every rank. Collective."""
        self._objects: list[ObjectT] = []
        run_on_rank0(lambda: self._objects.append(make()))

    @property
    def value(self) -> ObjectT:
        """The object. Raises LookupError on ranks other than 0."""
        return self._objects[0]

    def take(self) -> ObjectT:
        """Return the object and release it, so that its memory can be freed. Raises IndexError on other ranks than 0."""
        return self._objects.pop()

    def run(self, call: Callable[[ObjectT], T]) -> T:
        """Run `call(object)` on rank 0, and return its picklable result or raise its error on every rank. Collective."""
        return run_on_rank0(lambda: call(self.value))

    def run_local(self, call: Callable[[ObjectT], object]) -> None:
        """Run `call(object)` on rank 0. Other ranks return at once, and an error is raised on rank 0 only."""
        for held in self._objects:
            call(held)


def gather_from_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the picklable values of all ranks, or of all ranks of `group`, in rank order. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return cast(list[T], values)


def raise_on_all_ranks(error: MegatronRLError | None) -> None:
    """Raise the error of the first rank that passes one on all ranks. Collective."""
    for rank_error in gather_from_ranks(error):
        if rank_error is not None:
            raise rank_error


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Context manager that raises the first rank's `MegatronRLError` of the block on all ranks. Collective."""
    caught = None
    try:
        yield
    except MegatronRLError as error:
        caught = error
    raise_on_all_ranks(caught)


def to_run_error(error: BaseException) -> RunError | None:
    """Translate errors for a lost rank, missing memory, or a full disk into the error to show. Return None for other errors."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in line):
        asked = re.search(r"allocate ([\d.]+ \w+)", line)
        fix = "lower train.micro_batch_tokens, use recompute, or shard the model over more ranks: see megatron-rl plan"
        return RunError(f"rank {get_rank()} is out of memory{f' (it needs {asked[1]} more)' if asked else ''}; {fix}")
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return RunError(f"another trainer rank is gone ({line}); checkpoint.resume=auto continues from the last checkpoint")
    if failure := describe_disk_error(error):
        return RunError(f"rank {get_rank()}: {failure}; make room, and checkpoint.resume=auto continues from the last checkpoint")
    return None
