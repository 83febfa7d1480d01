"""torch's key-value store, where the members of a process group find each other, listening on one interface only.

torch's own `TCPStore` listens on every interface of the machine, whatever host it is given. It answers every client without
authentication, so it must be reachable through `host` only.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def listening_store(host: str, seconds: float) -> dist.TCPStore:
    """Start the store's server on a free port (`.port`) of `host`; `seconds` bounds its waits. Raise OSError if `host` cannot be bound."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        port, descriptor = listener.getsockname()[1], listener.detach()  # the store owns the socket from here on
    wait = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=descriptor)
