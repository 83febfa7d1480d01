"""Faults of real and fake engines: kills, hangs, broken connections, failed starts."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil

from megatron_rl.config import Config
from megatron_rl.distributed import Rank0, run_on_rank0
from megatron_rl.errors import RunError
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.recovery import RecoveringWeightSync
from parallel.transport.pack import ChunkPacker
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec
from support.processes import alive_after, family, until

Faults = dict[int, str]
"""Number of an engine -> what happens to it."""


def engine_family(engines: EnginePool, number: int) -> list[psutil.Process]:
    """Return an engine's servers and the processes below them, the first node's first."""
    return [process for pid in engines.replicas[number].engine.server.processes.pids for process in family(pid)]


def strike_while(work: Callable[[], Any], engines: EnginePool, sync: RecoveringWeightSync, version: int, faults: Faults) -> dict[str, Any]:
    """Do rank 0's `work` as the loop does, with faults in engines once they are busy. Return the `result`, and the pids of the lost
    engines' processes that still run (`left`)."""
    processes = [process for number in faults for process in engine_family(engines, number)]

    def strike() -> None:
        until(lambda: all(engines.replicas[number].outstanding for number in faults), 120, "every engine is at work")
        time.sleep(0.3)  # it has begun
        for number, fault in faults.items():
            _FAULTS[fault](engines, number)

    striking = threading.Thread(target=strike)
    striking.start()
    result = sync.run_with_recovery(version, lambda: run_on_rank0(work))
    striking.join()
    return {"result": result, "left": [process.pid for process in alive_after(processes, 10)]}


def sync_through(engines: Rank0[EnginePool], sync: RecoveringWeightSync, version: int, faults: Faults) -> dict[str, Any]:
    """Run a sync with faults in engines while rank 0 packs the third chunk. Collective."""
    pack, calls = ChunkPacker.pack, []

    def strike_and_pack(packer: ChunkPacker, *args: Any) -> str:
        calls.append(1)
        if len(calls) == 3:
            engines.run_local(lambda engines: [_FAULTS[fault](engines, number) for number, fault in faults.items()])
        return pack(packer, *args)

    with mock.patch.object(ChunkPacker, "pack", strike_and_pack):
        return asdict(sync.run(version))


def _kill(engines: EnginePool, number: int) -> None:
    engine_family(engines, number)[0].kill()


def _kill_last_node(engines: EnginePool, number: int) -> None:
    psutil.Process(engines.replicas[number].engine.server.processes.pids[-1]).kill()


def _hang_last_node(engines: EnginePool, number: int) -> None:
    for process in family(engines.replicas[number].engine.server.processes.pids[-1]):
        process.suspend()


def _hang(engines: EnginePool, number: int) -> None:
    """Suspend every process of the engine."""
    for process in engine_family(engines, number):
        process.suspend()


def _cut_requests(engines: EnginePool, number: int) -> None:
    """Shut down the connections of requests to the engine."""
    port = httpx.URL(engines.replicas[number].engine.server.url).port
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as client:
                client.shutdown(socket.SHUT_RDWR)


_FAULTS: dict[str, Callable[[EnginePool, int], None]] = {
    "kill": _kill,
    "kill last node": _kill_last_node,
    "hang": _hang,
    "hang last node": _hang_last_node,
    "cut requests": _cut_requests,
}


def fail_to_start(model: Path, folder: Path, start_timeout: float, *arguments: str) -> tuple[str, str]:
    """Start an engine that cannot start, with extra server `arguments`. Return the error message and its log tail."""
    config = Config.model_validate({"model": {"path": model}, "rollout": {"max_total_tokens": 4096, "start_timeout": start_timeout}})
    try:
        SGLangEngine(EngineLaunchSpec(config, model, folder, arguments=arguments)).wait_until_ready()
    except RunError as error:
        return str(error), error.log_tail
    raise AssertionError("the engine started")
