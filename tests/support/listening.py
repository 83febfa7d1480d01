"""The sockets on which processes listen, from /proc."""

import os
import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

_LISTEN, _ACCEPTS = "0A", 0x10000
"""State of a TCP socket, and flag of a Unix socket, that waits for connections."""


class Listening(NamedTuple):
    pid: int
    address: str
    """HOST:PORT, or the path of a Unix socket, which begins with @ if it is abstract."""


def find_listening(pids):
    """Return the sockets on which these processes listen, each in its own network namespace. Processes that have ended are left out."""
    found = []
    for pid in pids:
        with suppress(OSError):
            addresses = {**_read_tcp(pid, "tcp"), **_read_tcp(pid, "tcp6"), **_read_unix(pid)}
            found += [Listening(pid, addresses[inode]) for inode in _list_sockets(pid) if inode in addresses]
    return found


def _list_sockets(pid):
    """Return the inodes of a process's sockets."""
    inodes = set()
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{descriptor}")):
                    inodes.add(match[1])
    return inodes


def _read_tcp(pid, name):
    rows = [line.split() for line in Path(f"/proc/{pid}/net", name).read_text().splitlines()[1:]]
    return {row[9]: _read_address(row[1]) for row in rows if row[3] == _LISTEN}


def _read_address(text):
    """Return HOST:PORT. The kernel prints the host as words of four bytes in the order of the machine, here little-endian."""
    host, port = text.split(":")
    data = bytes.fromhex(host)
    swapped = b"".join(data[word : word + 4][::-1] for word in range(0, len(data), 4))
    address = IPv4Address(swapped) if len(swapped) == 4 else IPv6Address(swapped)
    return f"{getattr(address, 'ipv4_mapped', None) or address}:{int(port, 16)}"


def _read_unix(pid):
    rows = [line.split(maxsplit=7) for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return {row[6]: row[7] if len(row) > 7 else "" for row in rows if int(row[3], 16) & _ACCEPTS}
