"""The proxies of the environment (http_proxy, https_proxy, all_proxy, no_proxy). Calls between the processes of a run never use them.
Calls to a user's servers and to the hub do, unless `no_proxy` names the host or the host is this machine."""

import os
from collections.abc import Iterable
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

_LOCAL = ("127.0.0.1", "localhost", "::1")


def make_bypass(hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return NO_PROXY and no_proxy for the environment of a process whose calls to this machine and to `hosts` must not use a proxy. Both
    keep the entries of both, because programs differ in which one they read."""
    given = [entry for name in ("no_proxy", "NO_PROXY") for entry in os.environ.get(name, "").replace(" ", "").split(",") if entry]
    value = "*" if "*" in given else ",".join(dict.fromkeys([*given, *_LOCAL, *hosts]))  # "*" has a meaning only as the whole value
    return {"NO_PROXY": value, "no_proxy": value}


def uses_proxy(url: str) -> bool:
    """Return whether a call to a user's server goes to the environment's proxy, if there is one."""
    host = urlsplit(url).hostname or ""
    return not (host in _LOCAL or host.startswith("127.") or proxy_bypass(host))
