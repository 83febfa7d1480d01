"""Collective helpers: run work on rank 0 and hand its result or error to every rank, so that no rank waits for a dead one."""

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megatron_rl.errors import MegatronRLError, RunError, UserError, as_run_error, describe_disk_error
from parallel.plug import SignalExit, find_plug_error
from parallel.transport.sealed_store import SealError

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


@overload
def run_on_rank0(call: Callable[[], object]) -> None: ...
@overload
def run_on_rank0(call: Callable[[], T], kind: Any) -> T: ...
def run_on_rank0(call: Callable[[], Any], kind: Any = None) -> Any:
    """Run `call` on rank 0, and return its result or raise its `MegatronRLError` on every rank. Collective.

    Results travel as JSON, which every rank reads as a value of type `kind`. Without `kind`, the result is dropped.
    """
    outcome, error = try_call(call, kind) if is_rank0() else (b"", None)
    if get_rank_and_size()[1] > 1:
        outcome = broadcast_bytes(outcome, 0)
    return read_outcome(outcome, kind, error)


@overload
def write_on_rank0(work: Callable[[], object]) -> None: ...
@overload
def write_on_rank0(work: Callable[[], T], kind: Any) -> T: ...
def write_on_rank0(work: Callable[[], Any], kind: Any = None) -> Any:
    """Like `run_on_rank0`, for work that writes to disk: an OSError is raised as a RunError. Collective."""
    return run_on_rank0(as_run_error()(work), kind)


def broadcast_from(rank: int, value: T, kind: Any) -> T:
    """Return the `value` of type `kind` that `rank` passes. What other ranks pass does not matter. Collective."""
    return cast(T, _read(broadcast_bytes(_write(value, kind) if get_rank() == rank else b"", rank), kind))


def broadcast_bytes(data: bytes, source: int) -> bytes:
    """Return the bytes of rank `source`. Collective."""
    device = _find_device(None)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, source)
    sent = _to_tensor(data).to(device) if get_rank() == source else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(sent, source)
    return data if get_rank() == source else sent.cpu().numpy().tobytes()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None, everywhere: bool = True) -> list[bytes]:
    """Return the bytes of all ranks, or of all ranks of `group`, in rank order; on rank 0 alone unless `everywhere`. Collective."""
    device, count = _find_device(group), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group)
    lengths = torch.cat(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = _to_tensor(data)
    parts = [torch.empty(len(padded), dtype=torch.uint8, device=device) for _ in range(count if everywhere or is_rank0() else 0)]
    dist.all_gather(parts, padded.to(device), group) if everywhere else dist.gather(padded.to(device), parts or None, 0)
    return [part.cpu().numpy()[:length].tobytes() for part, length in zip(parts, lengths, strict=False)]


def exchange_bytes(parts: list[bytes]) -> list[bytes]:
    """Send the i-th part to rank i. Return the parts that were sent to this rank, in rank order. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return parts
    device = _find_device(None)
    sizes = torch.tensor([len(part) for part in parts], device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    lengths = incoming.tolist()
    received = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, _to_tensor(b"".join(parts)).to(device), lengths, sizes.tolist())
    return [part.numpy().tobytes() for part in received.cpu().split(lengths)]


def gather_on_rank0(data: bytes) -> list[bytes]:
    """Return the bytes of all ranks on rank 0, and nothing elsewhere. Collective."""
    return gather_bytes(data, everywhere=False) if get_rank_and_size()[1] > 1 else [data]


def scatter_from_rank0(parts: list[bytes]) -> bytes:
    """Return the part of this rank of those that rank 0 passes. What other ranks pass does not matter. Collective."""
    size = get_rank_and_size()[1]
    return exchange_bytes(parts if is_rank0() else [b""] * size)[0]


def sum_over_ranks(numbers: list[int]) -> list[int]:
    """Return the sums of integers over all ranks, below 2^63. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return numbers
    sums = torch.tensor(numbers, device=_find_device(None))
    dist.all_reduce(sums)
    return sums.tolist()


def _find_device(group: dist.ProcessGroup | None) -> torch.device:
    is_nccl = dist.get_backend(group) == dist.Backend.NCCL
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class _ErrorRecord(NamedTuple):
    """An expected error as plain data."""

    name: str  # of its class
    arguments: tuple[str | int | float | bool | None, ...]
    others: tuple[tuple[str, str | int | float | bool | None, str, str], ...] = ()  # arguments of further UserErrors

    @classmethod
    def of(cls, error: MegatronRLError) -> "_ErrorRecord":
        arguments: tuple[Any, ...] = (str(error),)
        if isinstance(error, UserError):
            is_plain = isinstance(error.value, str | int | float | None)
            field, value = (error.field, error.value) if is_plain else (f"{error.field} = {error.value}", None)
            arguments = field, value, error.rule, error.fix
        elif isinstance(error, RunError):
            arguments = str(error), error.log_tail
        # a file's name may hold bytes that are not UTF-8
        legible = (each.encode(errors="backslashreplace").decode() if isinstance(each, str) else each for each in arguments)
        others: Any = tuple(cls.of(each).arguments for each in error.others) if isinstance(error, UserError) else ()
        return cls(type(error).__name__, tuple(legible), others)

    def restore(self) -> MegatronRLError:
        classes: list[type[MegatronRLError]] = [MegatronRLError]
        for known in classes:
            classes += known.__subclasses__()
        others = ([UserError(*arguments) for arguments in self.others],) if self.others else ()
        return next(known for known in classes if known.__name__ == self.name)(*self.arguments, *others)


_VALUE, _ERROR = b"+", b"-"  # first byte of an outcome
NOTHING = _VALUE + b"null"
"""The outcome of a call without a result."""


def try_call(call: Callable[[], object], kind: Any) -> tuple[bytes, MegatronRLError | None]:
    """Return the outcome of `call` as bytes, and its error."""
    try:
        result = call()
    except MegatronRLError as error:
        return _ERROR + _write(_ErrorRecord.of(error), _ErrorRecord), error
    return _VALUE + _write(None if kind is None else result, kind), None


def read_outcome(outcome: bytes, kind: Any, error: MegatronRLError | None) -> Any:
    """Return the result, or raise the error: `error` on the rank that raised it first."""
    if outcome[:1] == _ERROR:
        raise error or _read(outcome[1:], _ErrorRecord).restore()
    return _read(outcome[1:], kind)


def _write(value: object, kind: Any) -> bytes:
    """Return JSON text, in ASCII. Raise PydanticSerializationError if `value` is not of type `kind`."""
    return json.dumps(_adapter(kind).dump_python(value, mode="json", warnings="error")).encode()


def _read(text: bytes, kind: Any) -> Any:
    """Return the value of type `kind`. Raise ValidationError, a ValueError, if the text holds another one."""
    return _adapter(kind).validate_json(text, strict=True)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


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

    @overload
    def run(self, call: Callable[[ObjectT], object]) -> None: ...
    @overload
    def run(self, call: Callable[[ObjectT], T], kind: Any) -> T: ...
    def run(self, call: Callable[[ObjectT], Any], kind: Any = None) -> Any:
        """Run `call(object)` on rank 0, and return its result of type `kind` or raise its error on every rank, like `run_on_rank0`.
        Collective."""
        return run_on_rank0(lambda: call(self.value), kind)

    def run_local(self, call: Callable[[ObjectT], object]) -> None:
        """Run `call(object)` on rank 0. Other ranks return at once, and an error is raised on rank 0 only."""
        for held in self._objects:
            call(held)


def gather_from_ranks(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of type `kind` of all ranks, or of all ranks of `group`, in rank order. They travel as JSON. Collective."""
    text = _write(value, kind)
    is_alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    return [_read(each, kind) for each in ([text] if is_alone else gather_bytes(text, group))]


def gather_errors(error: MegatronRLError | None) -> list[MegatronRLError | None]:
    """Return the errors that the ranks pass, in rank order. Collective."""
    records = gather_from_ranks(None if error is None else _ErrorRecord.of(error), _ErrorRecord | None)
    others = (None if record is None else record.restore() for record in records)
    return [error if rank == get_rank() else other for rank, other in enumerate(others)]


def raise_on_all_ranks(error: MegatronRLError | None) -> None:
    """Raise the error of the first rank that passes one on all ranks. Collective."""
    for rank_error in gather_errors(error):
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
    """Translate errors of a user's own object, or for a lost rank, missing memory, or a full disk, into the error to show. Return None for
    other errors."""
    if not isinstance(error, MegatronRLError | KeyboardInterrupt | SignalExit) and (failure := find_plug_error(error)):
        return RunError(str(failure))
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in line):
        asked = re.search(r"allocate ([\d.]+ \w+)", line)
        fix = "lower train.micro_batch_tokens, use recompute, or shard the model over more ranks: see megatron-rl plan"
        return RunError(f"rank {get_rank()} is out of memory{f' (it needs {asked[1]} more)' if asked else ''}; {fix}")
    if isinstance(error, SealError):
        return RunError(str(error))
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return RunError(f"another trainer rank is gone ({line}); checkpoint.resume=auto continues from the last checkpoint")
    if disk := describe_disk_error(error):
        return RunError(f"rank {get_rank()}: {disk}; once it is writable, checkpoint.resume=auto continues from the last checkpoint")
    return None
