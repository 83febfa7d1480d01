"""Collective helpers: run work on rank 0 and hand its result or error to every rank, so that no rank waits for a dead one."""

import datetime
import functools
import itertools
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megatron_rl.config.launch import read_launch
from megatron_rl.errors import MegatronRLError, RunError, UserError, as_run_error, describe_disk_error
from megatron_rl.hf.node_lock import make_cache_folder
from parallel.plug import find_plug_error
from parallel.transport.process_group import listening_store, runs_on_one_node
from parallel.transport.sealed_store import SealedStore, SealError
from parallel.user_code import SignalExit

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


@overload
def run_on_rank0(call: Callable[[], object]) -> None: ...
@overload
def run_on_rank0(call: Callable[[], T], kind: Any) -> T: ...
def run_on_rank0(call: Callable[[], Any], kind: Any = None) -> Any:
    """Run `call` on rank 0, and return its result or raise its `MegatronRLError` on every rank. Collective.

    Results travel as JSON, which every rank reads as a value of type `kind`. Without `kind`, the result is dropped.
    """
    outcome, error = _try(call, kind) if is_rank0() else (b"", None)
    if get_rank_and_size()[1] > 1:
        outcome = broadcast_bytes(outcome, 0)
    return _read_outcome(outcome, kind, error)


@overload
def write_on_rank0(work: Callable[[], object]) -> None: ...
@overload
def write_on_rank0(work: Callable[[], T], kind: Any) -> T: ...
def write_on_rank0(work: Callable[[], Any], kind: Any = None) -> Any:
    """Like `run_on_rank0`, for work that writes to disk: an OSError is raised as a RunError. Collective."""

    def attempt() -> Any:
        with as_run_error():
            return work()

    return run_on_rank0(attempt, kind)


def broadcast_from(rank: int, value: T, kind: Any) -> T:
    """Return the `value` of type `kind` that `rank` passes. What other ranks pass does not matter. Collective."""
    return cast(T, _read(broadcast_bytes(_write(value, kind) if get_rank() == rank else b"", rank), kind))


def share_before_start(key: str, call: Callable[[], T], kind: Any, store: dist.Store | None = None) -> T:
    """Like `run_on_rank0`, but works before the process group exists. Raise RunError if a rank is gone.

    Check the result: a stranger who reaches the launcher's store can replace it if the store is not sealed (`open_launch_store`).

    Args:
        key: names the result; may be used once per launch.
        kind: type of the result.
        store: replaces the launcher's store, on which the process group is built later.
    """
    (rank, size, *_), error = read_launch(joins=True), None
    try:
        store = open_launch_store(_STORE_TIMEOUT) if store is None else store
        if rank == 0:
            outcome, error = _try(call, kind)
            store.set(key, outcome.decode())  # JSON in ASCII
            store.wait([f"{key}/read/{other}" for other in range(1, size)])  # the store may end with this process
        else:
            outcome = store.get(key)
            store.set(f"{key}/read/{rank}", "")
    except (dist.DistError, SealError) as lost:
        raise to_run_error(lost) or lost from lost
    return cast(T, _read_outcome(outcome, kind, error))


def open_launch_store(timeout: datetime.timedelta, is_sealed: bool = True) -> dist.Store:
    """Return the store at which the ranks of this launch meet. `timeout` limits its waits from here on.

    torchrun serves it, on every interface. Under another launcher, rank 0 does, on one interface: loopback if all ranks are on one node.
    With `is_sealed`, its values carry a seal by a secret that only this user's processes can read: `MEGATRON_RL_LAUNCH_SECRET`
    (hexadecimal), or a file in the user's cache folder if all ranks are on one node.
    """
    if not _launch:
        store = dist.PrefixStore("megatron-rl", _connect_to_launch_store(timeout))
        secret = _share_secret(store)
        _launch[:] = [store, SealedStore(store, secret) if secret else store]
    _launch[0].set_timeout(timeout)
    return _launch[is_sealed]


_SECRET_VARIABLE = "MEGATRON_RL_LAUNCH_SECRET"
_launch: list[dist.Store] = []  # the store at which the ranks of this launch meet, plain and sealed


def _share_secret(store: dist.Store) -> bytes:
    """Return the launch's secret, or b"" if the ranks share no private place."""
    if given := os.environ.pop(_SECRET_VARIABLE, ""):  # children do not need it
        if not re.fullmatch(r"(?:[0-9a-fA-F]{2}){16,}", given):
            raise UserError(_SECRET_VARIABLE, None, "must be at least 32 hexadecimal digits", "make one with openssl rand -hex 32")
        return bytes.fromhex(given)
    if not runs_on_one_node():
        return b""
    (rank, size, *_), folder = read_launch(), make_cache_folder()
    if rank == 0:
        file, secret = folder / f"{secrets.token_hex(16)}.secret", secrets.token_bytes(32)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(secret)
        try:
            store.set("secret", file.name)
            store.wait([f"secret/read/{other}" for other in range(1, size)])
        finally:
            file.unlink()
        return secret
    name = store.get("secret").decode(errors="replace")
    if not re.fullmatch(r"[0-9a-f]{32}\.secret", name) or not (folder / name).is_file():
        raise RunError("rank 0's secret is not in this user's cache folder; start all ranks of a node as one user, with one XDG_CACHE_HOME")
    secret = (folder / name).read_bytes()
    store.set(f"secret/read/{rank}", "")
    return secret


def _connect_to_launch_store(timeout: datetime.timedelta) -> dist.Store:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    rank = read_launch(joins=True).rank
    host, port = "127.0.0.1" if runs_on_one_node() else os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        if not runs_on_one_node() and ip_address(address).is_loopback:  # Debian gives a node's own name such an address
            address = "0.0.0.0"
        return listening_store(str(address), timeout.total_seconds(), port)
    except OSError as error:
        rule = f"rank 0 cannot listen there ({error.strerror})"
        raise UserError("MASTER_ADDR and MASTER_PORT", f"{host}:{port}", rule, "name an address of its node and a free port") from None


_joins = itertools.count()


def join_ranks(backend: str, timeout: datetime.timedelta) -> None:
    """Create the process group of this launch's ranks, or of this process alone without a launcher."""
    launch, store = read_launch(joins=True), cast(dist.Store, dist.HashStore())
    if launch.is_launched:
        store = dist.PrefixStore(f"join {next(_joins)}", open_launch_store(timeout, is_sealed=backend != dist.Backend.NCCL))
    dist.init_process_group(backend, timeout=timeout, store=store, rank=launch.rank, world_size=launch.size)


def broadcast_bytes(data: bytes, source: int) -> bytes:
    """Return the bytes of rank `source`. Collective."""
    device = _find_device(None)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, source)
    sent = _to_tensor(data).to(device) if get_rank() == source else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(sent, source)
    return data if get_rank() == source else sent.cpu().numpy().tobytes()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of all ranks, or of all ranks of `group`, in rank order. Collective."""
    device, count = _find_device(group), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group)
    lengths = torch.cat(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = _to_tensor(data)
    parts = [torch.empty(len(padded), dtype=torch.uint8, device=device) for _ in range(count)]
    dist.all_gather(parts, padded.to(device), group)
    return [part.cpu().numpy()[:length].tobytes() for part, length in zip(parts, lengths, strict=True)]


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
    size, is_first = get_rank_and_size()[1], is_rank0()
    received = exchange_bytes([data, *[b""] * (size - 1)])
    return received if is_first else []


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


def _try(call: Callable[[], object], kind: Any) -> tuple[bytes, MegatronRLError | None]:
    """Return the outcome of `call` as bytes, and its error."""
    try:
        result = call()
    except MegatronRLError as error:
        return _ERROR + _write(_ErrorRecord.of(error), _ErrorRecord), error
    return _VALUE + _write(None if kind is None else result, kind), None


def _read_outcome(outcome: bytes, kind: Any, error: MegatronRLError | None) -> Any:
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
        return RunError(f"rank {get_rank()}: {disk}; make room, and checkpoint.resume=auto continues from the last checkpoint")
    return None
