"""A torch process group of the sending trainer ranks and the engine ranks, with point-to-point transfers only: NCCL if the tensors are on
GPUs, gloo on CPUs. It is a plain object, because trainer and engine each have a default group already."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel.chunking import CHUNKS_IN_FLIGHT, Chunk
from parallel.transport import base
from parallel.transport.sealed_store import SealedStore

_SHARED_GLOO = "gloo_one_loop"
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"  # torch's watchdog aborts the communicators of a failed group without ending the process
_POLL_SECONDS = 0.001


class Outbox(base.Outbox):
    on_device = True  # send from GPU memory if there is a GPU. If False, chunks are packed on the GPU and copied to the host as a whole.

    def __init__(self, settings: base.TransportSettings, rank: int, chunks: Sequence[Chunk], route: base.Route) -> None:
        self._rank, self._timeout, self._host = rank, settings.timeout, settings.host
        self._sources, self._targets, self._size = route
        self._store: Any = listening_store(self._host, self._timeout) if rank == self._sources[0] else None
        self.address = [self._host, self._store.port, secrets.token_hex(16)] if self._store is not None else None
        self._group: Any = None
        self._buffers: list[torch.Tensor] = []
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._sent = 0
        self._packed: torch.Tensor | None = None

    def open(self, addresses: Mapping[int, Any]) -> None:
        if self._rank not in self._sources:
            return
        group_rank, size = self._sources.index(self._rank), len(self._sources) + len(self._targets)
        host, port, secret = addresses[self._sources[0]]
        store = self._store or _connect_to_store(host, port, self._timeout)
        device = buffer_device(self.on_device)
        self._sealed = SealedStore(store, bytes.fromhex(secret))
        self._group = _make_group(store, self._sealed, group_rank, size, self._host, self._timeout, device)
        self._buffers = _make_buffers(self._size, device)
        self._packed = None if self.on_device else make_gpu_buffer(self._size)

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        if len(self._sending) == CHUNKS_IN_FLIGHT:
            self._wait_for_oldest()
        return self._next(chunk) if self._packed is None else self._packed[: chunk.nbytes]

    def send(self, chunk: Chunk) -> None:
        flat = self._next(chunk)
        if self._packed is not None:
            flat.copy_(self._packed[: chunk.nbytes])
        receiver = len(self._sources) + self._targets.index(chunk.target)
        self._sending.append((self._group.send([flat], receiver, 0), flat))
        self._sent += 1

    def finish(self) -> None:
        while self._sending:
            self._wait_for_oldest()
        if self._buffers and self._buffers[0].is_cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        if isinstance(self._group, NcclGroup):  # transfers of gloo fail with the last reference to the group
            self._group.abort()
        self._group = self._store = None
        self._sending.clear()
        self._buffers, self._packed = [], None

    def _next(self, chunk: Chunk) -> torch.Tensor:
        return self._buffers[self._sent % CHUNKS_IN_FLIGHT][: chunk.nbytes]

    def _wait_for_oldest(self) -> None:
        self._sending[0][0].wait()
        self._sending.popleft()


class Inbox(base.Inbox):
    """Posts as many receives ahead as there are buffers."""

    on_device = True

    def __init__(self, link: base.Link, rank: int, chunks: Sequence[Chunk]) -> None:
        (host, port, secret), timeout = link.addresses[str(link.sources[0])], link.timeout
        self._group_rank = {source: index for index, source in enumerate(link.sources)}
        own_rank, size = len(link.sources) + link.targets.index(rank), len(link.sources) + len(link.targets)
        device = buffer_device(self.on_device)
        store = _connect_to_store(host, port, timeout)
        self._sealed = SealedStore(store, bytes.fromhex(secret))
        self._group: Any = _make_group(store, self._sealed, own_rank, size, host, timeout, device)
        self._buffers = _make_buffers(link.largest, device)
        self._packed = None if self.on_device else make_gpu_buffer(link.largest)
        self._chunks, self._posted, self._in_use = chunks, 0, 0
        self._receiving: deque[tuple[Any, torch.Tensor]] = deque()

    def start(self, chunks: Sequence[Chunk]) -> None:
        self._chunks, self._posted = chunks, 0

    def receive(self, chunk: Chunk) -> torch.Tensor:
        while self._posted < len(self._chunks) and len(self._receiving) + self._in_use < CHUNKS_IN_FLIGHT:
            self._post(self._chunks[self._posted])
        work, flat = self._receiving.popleft()
        self._in_use = 1
        work.wait()
        return flat if self._packed is None else self._packed[: chunk.nbytes].copy_(flat)

    def release(self, chunk: Chunk) -> None:
        self._in_use = 0

    def finish(self) -> None:
        self._posted = 0

    def close(self) -> None:
        if isinstance(self._group, NcclGroup):  # transfers of gloo fail with the last reference to the group
            self._group.abort()
        self._group = None
        self._receiving.clear()

    def _post(self, chunk: Chunk) -> None:
        flat = self._buffers[self._posted % CHUNKS_IN_FLIGHT][: chunk.nbytes]
        self._receiving.append((self._group.recv([flat], self._group_rank[chunk.source], 0), flat))
        self._posted += 1


def buffer_device(on_device: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_device and torch.cuda.is_available() else torch.device("cpu")


def make_gpu_buffer(nbytes: int) -> torch.Tensor | None:
    """Return a buffer in GPU memory, or None without a GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda") if torch.cuda.is_available() else None


def _make_buffers(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(CHUNKS_IN_FLIGHT)]


def _make_group(store: Any, sealed: SealedStore, rank: int, size: int, host: str, timeout: float, device: torch.device) -> Any:
    if device.type == "cuda":
        return NcclGroup(store, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    return _make_gloo_group(sealed, rank, size, timedelta(seconds=timeout), [gloo.create_device(hostname=find_local_address(host))])


def _make_gloo_group(store: Any, rank: int, size: int, timeout: timedelta, devices: list[Any]) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = devices, timeout
    return gloo(store, rank, size, options)


_own_address: list[str] = []


def set_gloo_address(address: str) -> None:
    """Set the address at which other nodes reach this process, for `register_shared_gloo`. gloo's own choice is that of the host's name,
    which is a loopback address on Debian."""
    _own_address[:] = [address]


@functools.cache
def register_shared_gloo() -> str:
    """Register a gloo backend whose groups share one event loop per process, and return its name for `init_process_group`. With torch's
    own, the threads of Megatron's twenty groups on eight ranks would wake 16,000 times a second. Groups that are made later inherit it.
    Between nodes it uses GLOO_SOCKET_IFNAME or, if that is not set, `set_gloo_address`."""

    @functools.cache
    def choose_devices() -> list[Any]:
        gloo: Any = dist.ProcessGroupGloo
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if names:
            return [gloo.create_device(interface=name) for name in names]
        return [gloo.create_device(hostname="127.0.0.1" if runs_on_one_node() else _own_address[0])]

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return _make_gloo_group(store, rank, size, timeout, choose_devices())

    dist.Backend.register_backend(_SHARED_GLOO, make, devices=["cpu"])
    return _SHARED_GLOO


def runs_on_one_node() -> bool:
    """Return whether all ranks of this launch are known to be on this machine, so that they can meet on loopback."""
    size, local = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
    host = os.environ.get("MASTER_ADDR", "")
    return "RANK" not in os.environ or size in ("1", local) or host in ("localhost", "::1") or host.startswith("127.")


def listening_store(host: str, seconds: float, port: int = 0) -> dist.TCPStore:
    """Start a TCPStore server that listens on `host` only, by default on a free port (`.port`). Raise OSError if it cannot be bound.
    torch's own server listens on every interface, without authentication. `seconds` limits the store's waits."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        port, descriptor = listener.getsockname()[1], listener.detach()  # the store owns the socket from here on
    wait = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=descriptor)


def _connect_to_store(host: str, port: int, timeout: float) -> Any:
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def find_local_address(host: str) -> str:
    """Return this machine's address on the route to `host`, without sending anything. Raise OSError if there is no route."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as datagram:
        datagram.connect(address)
        return datagram.getsockname()[0]


class NcclGroup:
    """Point-to-point transfers over NCCL. A lost peer raises an error in the call that waits for it, as with gloo, so that another engine
    can replace it; by default NCCL waits forever, and torch's watchdog ends the process. Not run on a GPU yet."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        """Wait until every member has joined, because NCCL would wait for a missing member forever. `timeout`: seconds, of every wait."""
        self._timeout = timeout
        store.set(f"joined {rank}", "")
        store.wait([f"joined {member}" for member in range(size)], timedelta(seconds=timeout))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = _CLEAN_UP_ONLY  # read by the constructor; other groups keep their setting
        try:
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            os.environ.pop(_ERROR_HANDLING)
            if before is not None:
                os.environ[_ERROR_HANDLING] = before

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> NcclTransfer:
        return NcclTransfer(self._group, self._group.send(tensors, peer, tag), self._timeout)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> NcclTransfer:
        return NcclTransfer(self._group, self._group.recv(tensors, peer, tag), self._timeout)

    def abort(self) -> None:
        """End all transfers, for which the GPU would otherwise wait forever."""
        self._group.abort()


class NcclTransfer:
    def __init__(self, group: Any, work: Any, timeout: float) -> None:
        self._group, self._work, self._timeout = group, work, timeout

    def wait(self) -> None:
        """Wait until the transfer is done. Raise RuntimeError if it fails or times out."""
        deadline = time.monotonic() + self._timeout
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"its peer moved no chunk within {self._timeout:g} s (sync.timeout)")
            time.sleep(_POLL_SECONDS)
        if (error := self._group.get_error()).name != "SUCCESS":
            raise RuntimeError(f"NCCL reports {error.name}")
        self._work.wait()  # only orders the streams
