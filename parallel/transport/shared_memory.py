"""Shared memory of one host: a ring of buffers in an anonymous memory file, which vanishes with the processes that hold it. Each pair of
ranks has a Unix socket, over which one byte says which buffer was filled or is free. The socket orders memory accesses, blocks without
polling, and closes when the other process ends, so no process waits for a dead one. `cuda_ipc` allocates the ring elsewhere."""

import contextlib
import mmap
import os
import shutil
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from parallel.chunking import CHUNKS_IN_FLIGHT, Chunk
from parallel.transport import base

_NUMBER = struct.Struct("<q")


class Outbox(base.Outbox):
    """Fills one buffer after the other, and waits until the next buffer has been read."""

    def __init__(self, settings: base.TransportSettings, rank: int, chunks: Sequence[Chunk], route: base.Route) -> None:
        self._targets = sorted({chunk.target for chunk in chunks if chunk.source == rank})
        self._size = route.largest
        self._folder = Path(tempfile.mkdtemp(prefix="megatron-rl-"))  # readable by this user only
        self._timeout = settings.timeout
        self.address = str(self._folder / "ring")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(settings.timeout)
        self._listener.bind(self.address)
        self._listener.listen()
        self._peers: dict[int, socket.socket] = {}
        self._readers: deque[int] = deque()
        self._sent = 0
        self._ring = torch.empty(0, dtype=torch.uint8)

    def make_ring(self, nbytes: int) -> tuple[torch.Tensor, list[int], bytes]:
        """Allocate memory. Return it as uint8 [nbytes], with the file descriptors and the description by which the reader opens it."""
        descriptor = os.memfd_create("megatron-rl-ring")
        os.posix_fallocate(descriptor, 0, nbytes)  # too little memory is an error here, not a crash later
        return _map(descriptor, nbytes), [descriptor], b"memfd"

    def settle(self) -> None:
        """Wait until writes to the ring are visible to other processes."""

    def open(self, addresses: Mapping[int, Any]) -> None:
        if not self._targets:
            return
        self._ring, descriptors, description = self.make_ring(CHUNKS_IN_FLIGHT * self._size)
        while len(self._peers) < len(self._targets):
            peer, _ = self._listener.accept()
            peer.settimeout(self._timeout)
            (rank,) = _NUMBER.unpack(_read(peer, _NUMBER.size))
            socket.send_fds(peer, [_NUMBER.pack(len(description))], descriptors)
            peer.sendall(description)
            self._peers[rank] = peer
        for descriptor in descriptors:
            os.close(descriptor)

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        if len(self._readers) == CHUNKS_IN_FLIGHT:
            self._wait_for_oldest()
        start = self._sent % CHUNKS_IN_FLIGHT * self._size
        return self._ring[start : start + chunk.nbytes]

    def send(self, chunk: Chunk) -> None:
        self.settle()
        self._peers[chunk.target].sendall(bytes([self._sent % CHUNKS_IN_FLIGHT]))
        self._readers.append(chunk.target)
        self._sent += 1

    def finish(self) -> None:
        while self._readers:
            self._wait_for_oldest()

    def close(self) -> None:
        for peer in (*self._peers.values(), self._listener):
            peer.close()
        self._ring = torch.empty(0, dtype=torch.uint8)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_oldest(self) -> None:
        _read(self._peers[self._readers[0]], 1)
        self._readers.popleft()


class Inbox(base.Inbox):
    """Reads the rings of all trainer ranks that send to this engine rank."""

    def __init__(self, link: base.Link, rank: int, chunks: Sequence[Chunk]) -> None:
        self._link, self._rank, self._size = link, rank, link.largest
        self._peers: dict[int, socket.socket] = {}
        self._rings: dict[int, torch.Tensor] = {}
        self._slots: dict[int, int] = {}
        try:
            for source in sorted({chunk.source for chunk in chunks}):
                self._connect(source)
        except BaseException:
            self.close()
            raise

    def open_ring(self, descriptors: list[int], description: bytes, nbytes: int) -> torch.Tensor:
        """Return the sender's memory as uint8 [nbytes]."""
        return _map(descriptors[0], nbytes)

    def settle(self) -> None:
        """Wait until this rank's reads of the ring are done."""

    def receive(self, chunk: Chunk) -> torch.Tensor:
        (slot,) = _read(self._peers[chunk.source], 1)
        self._slots[chunk.source] = slot
        return self._rings[chunk.source][slot * self._size : slot * self._size + chunk.nbytes]

    def release(self, chunk: Chunk) -> None:
        self.settle()
        self._peers[chunk.source].sendall(bytes([self._slots.pop(chunk.source)]))

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._rings.clear()

    def _connect(self, source: int) -> None:
        peer = self._peers[source] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(self._link.timeout)
        address = self._link.addresses[str(source)]
        try:
            peer.connect(address)
        except OSError as error:
            raise OSError(f"cannot reach trainer rank {source} at {address} ({error}); is it on this host?") from None
        peer.sendall(_NUMBER.pack(self._rank))
        header, descriptors, _, _ = socket.recv_fds(peer, _NUMBER.size, 4)
        try:
            header += _read(peer, _NUMBER.size - len(header))
            description = _read(peer, _NUMBER.unpack(header)[0])
            self._rings[source] = self.open_ring(descriptors, description, CHUNKS_IN_FLIGHT * self._size)
        finally:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)  # unmapped with its last view


def _read(peer: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes. Raise ConnectionError if the other side is gone, TimeoutError if it is silent."""
    received = b""
    while len(received) < count:
        try:
            more = peer.recv(count - len(received))
        except TimeoutError:
            raise TimeoutError(f"the other side was silent for {peer.gettimeout():g} s (sync.timeout)") from None
        if not more:
            raise ConnectionError("the other side closed the connection")
        received += more
    return received
