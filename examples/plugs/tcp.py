"""A transport: trainer ranks listen on TCP sockets, engine ranks connect, and chunks are sent as plain bytes.

    [sync]
    transport = "examples.plugs.tcp:TRANSPORT"

The engine process also imports this file, from PYTHONPATH or from the run's working directory. There is no encryption and no
authentication: use it only in a private network.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallel.chunking import Chunk
from parallel.transport import base

TRANSPORT = base.Transport(__name__, devices=("cpu",))


class Outbox(base.Outbox):
    def __init__(self, settings: base.TransportSettings, rank: int, chunks: Sequence[Chunk], route: base.Route) -> None:
        self._engines = len({chunk.target for chunk in chunks if chunk.source == rank})
        self._buffer = torch.empty(route.largest, dtype=torch.uint8)
        self._timeout = settings.timeout
        self._listener = socket.create_server((settings.host if settings.host == "127.0.0.1" else socket.gethostname(), 0))
        self._listener.settimeout(settings.timeout)
        self._peers: dict[int, socket.socket] = {}
        self.address = self._listener.getsockname()[:2]

    def open(self, addresses: Mapping[int, Any]) -> None:
        while len(self._peers) < self._engines:
            peer, _ = self._listener.accept()
            peer.settimeout(self._timeout)
            number = bytearray(4)
            _read_into(peer, number)
            self._peers[int.from_bytes(number, "big")] = peer

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        return self._buffer[: chunk.nbytes]

    def send(self, chunk: Chunk) -> None:
        self._peers[chunk.target].sendall(self._buffer[: chunk.nbytes].numpy().data)  # returns once the buffer may be reused

    def close(self) -> None:
        for end in (*self._peers.values(), self._listener):
            end.close()


class Inbox(base.Inbox):
    def __init__(self, link: base.Link, rank: int, chunks: Sequence[Chunk]) -> None:
        self._buffer = torch.empty(link.largest, dtype=torch.uint8)
        self._peers = {}
        for source in {chunk.source for chunk in chunks}:
            self._peers[source] = socket.create_connection(link.addresses[str(source)], link.timeout)
            self._peers[source].sendall(rank.to_bytes(4, "big"))

    def receive(self, chunk: Chunk) -> torch.Tensor:
        flat = self._buffer[: chunk.nbytes]
        _read_into(self._peers[chunk.source], flat.numpy())
        return flat

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _read_into(peer: socket.socket, buffer: Any) -> None:
    """Fill the buffer. Raise ConnectionError if the peer closes the connection, or TimeoutError if it stays silent."""
    unread = memoryview(buffer)
    while unread:
        count = peer.recv_into(unread)
        if not count:
            raise ConnectionError("the other side closed the connection")
        unread = unread[count:]
