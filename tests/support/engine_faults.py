"""Faults of engines: strikes, kills, and the engine's own settings of tests."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from megatron_rl.config import Config
from megatron_rl.errors import RunError
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.recovery import RecoveringWeightSync
from parallel.transport.pack import ChunkPacker
from rollout_sglang import engine, launch_args

Faults = dict[int, str]
"""Number of an engine -> what happens to it."""


def family_of(engines: EnginePool, number: int) -> list[psutil.Process]:
    """An engine's server and what runs below it."""
    server = psutil.Process(engines._replicas[number].engine.process.pid)
    return [server, *server.children(recursive=True)]


def strike_while(work: Callable[[], Any], engines: EnginePool, sync: RecoveringWeightSync, version: int, faults: Faults) -> dict[str, Any]:
    """Rank 0's `work`, done as the loop does it, with faults in engines once they are at work: {"said": its result, "left": pids of the
    lost engines' processes that still run}."""
    below = [process for number in faults for process in family_of(engines, number)]
    places = [engines._replicas[number] for number in faults]

    def strike() -> None:
        _until(lambda: all(place.outstanding for place in places))
        for number, fault in faults.items():
            _FAULTS[fault](engines, sync, number)

    striking = threading.Thread(target=strike)
    striking.start()
    found = sync.run_with_recovery(version, work)
    striking.join(30)
    return {"said": found, "left": [process.pid for process in below if process.is_running()]}


def sync_through(engines: EnginePool | None, sync: RecoveringWeightSync, version: int, faults: Faults) -> dict[str, Any]:
    """A sync with faults in engines while the third chunk of rank 0 is packed; collective."""
    pack, calls = ChunkPacker.pack, []

    def packed(memory: ChunkPacker, *args: Any) -> str:
        calls.append(1)
        if len(calls) == 3 and engines is not None:
            for number, fault in faults.items():
                _FAULTS[fault](engines, sync, number)
        return pack(memory, *args)

    ChunkPacker.pack = packed
    try:
        return asdict(sync.run(version))
    finally:
        ChunkPacker.pack = pack


def _kill(engines: EnginePool, _: RecoveringWeightSync, number: int) -> None:
    family_of(engines, number)[0].kill()


def _hang(engines: EnginePool, _: RecoveringWeightSync, number: int) -> None:
    """Every process of the engine stands still."""
    for process in family_of(engines, number):
        process.suspend()


def _cut_requests(engines: EnginePool, _: RecoveringWeightSync, number: int) -> None:
    """The connections over which the engine is asked end under way."""
    port = httpx.URL(engines._replicas[number].engine._http.base_url).port
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as found:
                found.shutdown(socket.SHUT_RDWR)


def _cut_ring(_: EnginePool, sync: RecoveringWeightSync, number: int) -> None:
    """The connection over which weights go to the engine ends under way."""
    sync._sync._outbox._peers[number].shutdown(socket.SHUT_RDWR)


_FAULTS: dict[str, Callable[[EnginePool, RecoveringWeightSync, int], None]] = {
    "kill": _kill,
    "hang": _hang,
    "cut requests": _cut_requests,
    "cut ring": _cut_ring,
}


def _until(condition: Callable[[], bool], seconds: float = 30) -> None:
    pause = threading.Event()
    for _ in range(int(seconds * 100)):
        if condition():
            pause.wait(0.3)  # it has begun
            return
        pause.wait(0.01)
    raise AssertionError("it never came")


_SMALL = {"max_running_requests": 16, "max_total_tokens": 4096, "request_timeout": 60.0}


def engine_config(checkpoint: Path, precision: dict[str, Any], start_timeout: float = 240.0) -> Config:
    rollout = {**_SMALL, "start_timeout": start_timeout}
    return Config.model_validate({"model": {"path": checkpoint}, "precision": precision, "rollout": rollout})


def launch_only(checkpoint: Path, folder: Path, fault: dict[str, Any]) -> tuple[str, str, float]:
    """Starts an engine that cannot start: (the error's line, its log tail, seconds it took).

    `fault`: `start_timeout` in seconds, a `port` to insist on, or a server `argument`.
    """
    config = engine_config(checkpoint, {"mode": "fp8_unified", "high": "fp32"}, fault.get("start_timeout", 240.0))
    if "port" in fault:
        launch_args._free_port = lambda slot: fault["port"]
    if "argument" in fault:
        arguments = launch_args._server_arguments
        launch_args._server_arguments = lambda *given: [*arguments(*given), fault["argument"]]
    began = time.perf_counter()
    try:
        engine.start_engine_and_wait(config, checkpoint, folder).stop()
    except RunError as error:
        return str(error), error.log_tail, time.perf_counter() - began
    raise AssertionError("the engine started")
