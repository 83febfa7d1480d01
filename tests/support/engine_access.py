"""Who may ask a live engine, and where its key could be read; see `support.trainer_engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import psutil

from support.engine_faults import engine_family
from support.trainer_engine import current

ENDPOINTS = (
    "/generate", "/weights_checker", "/abort_request", "/flush_cache", "/begin_weight_update", "/end_weight_update",
    "/update_weight_version", "/update_weights_from_tensor", "/update_weights_from_disk", "/load_lora_adapter", "/server_info",
)  # fmt: skip


def ask_without_key() -> dict[str, list[int]]:
    """Statuses of every endpoint that the project uses, and of some that it does not, without a key and with a wrong one."""
    url, wrong = current().engines.replicas[0].engine.server.url, {"Authorization": f"Bearer {'0' * 48}"}
    return {path: [httpx.post(url + path, json={}, headers=headers).status_code for headers in ({}, wrong)] for path in ENDPOINTS}


def read_server_arguments(names: list[str]) -> dict[str, Any]:
    """The first engine's server arguments of these names, as SGLang says that it has them."""

    def read(engines: Any) -> dict[str, Any]:
        engine = engines.replicas[0].engine
        answer = httpx.get(
            f"{engine.server.url}/server_info", headers={"Authorization": f"Bearer {engine.server.api_key}"}, timeout=60
        ).json()
        return {name: answer[name] for name in names}

    return current().rank0_engines.run(read)


def find_exposed() -> dict[str, Any]:
    """Addresses that the engines' processes listen on, modes of their Unix sockets, and where a key may be read."""
    addresses, modes, readable = set(), set(), []
    for number, engine in enumerate(replica.engine for replica in current().engines.replicas):
        key = engine.server.api_key
        assert len(key) == 48
        for process in engine_family(current().engines, number):
            if any(key in word for word in process.cmdline()):
                readable.append(f"command line of {process.pid}")
            addresses |= {entry.laddr.ip for entry in process.net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
            sockets = [Path(entry.laddr) for entry in process.net_connections("unix") if entry.laddr]
            modes |= {path.stat().st_mode & 0o077 for path in sockets if path.exists()}
        readable += [str(file) for file in current().folder.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    return {"addresses": addresses, "modes": modes, "readable": readable}
