"""torch's key-value store, where the members of a process group find each other, listening on one interface only.

torch's own `TCPStore` listens on every interface of the machine, whatever host it is given. It answers every client without
authentication, so it must be reachable through `host` only.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def listening_store(host: str, seconds: float, port: int = 0) -> dist.TCPStore:
    """Start the store's server on a port of `host`, by default a free one (`.port`); `seconds` bounds its waits. Raise OSError if it cannot
    be bound."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        port, descriptor = listener.getsockname()[1], listener.detach()  # the store owns the socket from here on
    wait = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=descriptor)


def find_local_address(host: str) -> str:
    """Return this machine's address on the way to `host`; nothing is sent. Raise OSError if there is no way."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as datagram:
        datagram.connect(address)
        return datagram.getsockname()[0]
