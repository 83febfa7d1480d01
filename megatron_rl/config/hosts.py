"""Validation of host addresses to listen on."""

import ipaddress
import socket
from typing import Annotated

from pydantic import AfterValidator


def require_single_interface(host: str) -> str:
    """Return `host`. Raise ValueError if it stands for all interfaces of the machine, such as "0.0.0.0" or "::" in any spelling, or is no
    name of a host."""
    if not host.isprintable() or " " in host:
        raise ValueError("is not a host name")
    try:
        entries = socket.getaddrinfo(host or "0", None, flags=socket.AI_NUMERICHOST)
    except UnicodeError:
        raise ValueError("is not a host name") from None
    except OSError:  # a host name, which is resolved when the socket is bound
        return host
    addresses = [ipaddress.ip_address(str(entry[4][0])) for entry in entries]
    if any((getattr(address, "ipv4_mapped", None) or address).is_unspecified for address in addresses):
        raise ValueError("listens on every network interface; use the address of one interface, loopback or in a private network")
    return host


def join_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address (RFC 3986, section 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_listening(host: str, port: int) -> None:
    """Raise OSError if a server cannot listen on this port."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    socket.create_server((host, port), family=family).close()


def is_loopback(host: str) -> bool:
    """Return whether `host`, a numeric address or a name, is only reachable from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return host == "localhost"


Host = Annotated[str, AfterValidator(require_single_interface)]
"""Name or address of one network interface."""
