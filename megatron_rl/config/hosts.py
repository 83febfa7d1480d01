"""Addresses to listen on. Imports without torch."""

from __future__ import annotations

import ipaddress
import socket
from typing import Annotated

from pydantic import AfterValidator


def require_single_interface(host: str) -> str:
    """Return `host`. Raise ValueError where it stands for every interface of the machine: "0.0.0.0", "::", in any spelling."""
    try:
        entries = socket.getaddrinfo(host or "0", None, flags=socket.AI_NUMERICHOST)
    except OSError:  # a name, which is resolved where it is bound
        return host
    addresses = [ipaddress.ip_address(str(entry[4][0])) for entry in entries]
    if any((getattr(address, "ipv4_mapped", None) or address).is_unspecified for address in addresses):
        raise ValueError("stands for every interface of the machine; name one, loopback or of a private network")
    return host


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`, a numeric address or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


Host = Annotated[str, AfterValidator(require_single_interface)]
"""A name or address of one interface."""
