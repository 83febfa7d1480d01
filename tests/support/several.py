"""A trainer with several real engines below it, and what may go wrong with them; run as the one rank of a `World`."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from megatron_rl.algorithm.loss import PolicyLoss
from megatron_rl.batch import Sequence
from megatron_rl.config import Config
from megatron_rl.config_algorithm import Algorithm
from megatron_rl.config_sync import Sync
from megatron_rl.engines import Engines, start_engines
from megatron_rl.steady import SteadySync
from megatron_rl.sync import WeightSync
from megatron_rl.sync_plan import SyncPlan, check_live_engine
from megatron_rl.transport.chunks import Memory
from megatron_rl.types import Sampling
from parallel.geometry import ModelGeometry
from support.served import Served

_BUCKET = 64 << 10
Said = tuple[list[int], list[float], int]
"""Tokens, log-probs and policy version of one completion."""


class Several(Served):
    """See `Served`; `engine` is an `Engines`."""

    engines: Engines
    steady: SteadySync
    said: list[str]

    def bring_up(self, count: int, health_timeout: float) -> None:
        rollout = {"engines": count, "health_timeout": health_timeout, "start_timeout": 500.0}
        self.config = Config.model_validate({**self.config.model_dump(), "rollout": {**self.config.rollout.model_dump(), **rollout}})
        self.said = []
        self.engines = start_engines(self.config, self.save(self.folder / "engine_model"), self.folder, self.said.append)
        contract, geometry = self.trainer.contract, ModelGeometry.from_hf_config(self.trainer.hf_config)
        plan = SyncPlan.make(geometry, self.trainer.layout, (1, 1), contract, _BUCKET, count)
        sync = WeightSync(plan, self.engines, self.trainer.planes, Sync(timeout=60.0))
        check_live_engine(plan, self.engines)
        self.engines.graph()
        sync.prove()
        self.steady = SteadySync(sync, self.engines, self.said.append)


_now: list[Several] = []


def start(checkpoint: Path, folder: Path, precision: dict[str, Any], count: int, health_timeout: float) -> None:
    """Brings up trainer and engines."""
    several = Several(checkpoint, folder, precision)
    several.bring_up(count, health_timeout)
    _now[:] = [several]


def train(batch: list[Sequence]) -> None:
    """One optimizer step."""
    _now[0].trainer.actor.update(batch, PolicyLoss(Algorithm()))


def sync(version: int) -> dict[str, Any]:
    return asdict(_now[0].steady.run(version))


def said() -> list[str]:
    """What was told the user since the last time."""
    lines, _now[0].said[:] = list(_now[0].said), []
    return lines


def generate(prompts: list[list[int]], tokens: int, alone: int | None = None) -> list[Said]:
    """All prompts, each with a seed of its own, to all engines or to one of them."""
    samplings = [Sampling(1.0, tokens, seed) for seed in range(len(prompts))]
    engines = _now[0].engines
    asked = engines if alone is None else engines._places[alone].engine
    return [(one.output_ids_T, one.logprobs_T, one.policy_version) for one in asked.generate(prompts, samplings)]


def generate_through(faults: dict[int, str], version: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """`generate`, done as the loop does it, with faults in these engines once they are at work; and processes that are left of them."""
    several = _now[0]
    below = [process for number in faults for process in _family(several, number)]
    places = [several.engines._places[number] for number in faults]

    def strike() -> None:
        _until(lambda: all(place.outstanding for place in places))
        for number, fault in faults.items():
            _FAULTS[fault](several, number)

    striking = threading.Thread(target=strike)
    striking.start()
    found = several.steady.serving(version, lambda: generate(prompts, tokens))
    striking.join(30)
    return {"said": found, "left": [process.pid for process in below if process.is_running()]}


def sync_through(faults: dict[int, str], version: int) -> dict[str, Any]:
    """`sync` with faults in these engines while the third chunk is packed."""
    several, pack, calls = _now[0], Memory.pack, []

    def packed(memory: Memory, *args: Any) -> str:
        calls.append(1)
        if len(calls) == 3:
            for number, fault in faults.items():
                _FAULTS[fault](several, number)
        return pack(memory, *args)

    Memory.pack = packed
    try:
        return sync(version)
    finally:
        Memory.pack = pack


def _family(several: Several, number: int) -> list[psutil.Process]:
    server = psutil.Process(several.engines._places[number].engine.process.pid)
    return [server, *server.children(recursive=True)]


def _kill(several: Several, number: int) -> None:
    _family(several, number)[0].kill()


def _stop(several: Several, number: int) -> None:
    """Every process of the engine stands still, as if it hung."""
    for process in _family(several, number):
        process.suspend()


def _cut_requests(several: Several, number: int) -> None:
    """The connections over which engine `number` is asked end under way."""
    port = httpx.URL(several.engines._places[number].engine._http.base_url).port
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with _descriptor(connection.fd) as found:
                found.shutdown(socket.SHUT_RDWR)


def _cut_ring(several: Several, number: int) -> None:
    """The connection over which weights go to engine `number` ends under way."""
    several.steady._sync._outbox._peers[number].shutdown(socket.SHUT_RDWR)


_FAULTS: dict[str, Callable[[Several, int], None]] = {
    "kill": _kill,
    "hang": _stop,
    "cut requests": _cut_requests,
    "cut ring": _cut_ring,
}


@contextmanager
def _descriptor(number: int) -> Iterator[socket.socket]:
    with socket.socket(fileno=os.dup(number)) as found:
        yield found


def _until(condition: Callable[[], bool], seconds: float = 30) -> None:
    pause = threading.Event()
    for _ in range(int(seconds * 100)):
        if condition():
            pause.wait(0.3)  # it has begun
            return
        pause.wait(0.01)
    raise AssertionError("it never came")


def without_key() -> dict[str, list[int]]:
    """Every endpoint that an engine is asked at, and some that nobody asks at: its answers without a key, and with a wrong one."""
    engine = _now[0].engines._places[0].engine
    wrong = {"Authorization": f"Bearer {'0' * 48}"}
    found = {}
    for path in ENDPOINTS:
        answers = [httpx.post(engine._http.base_url.join(path), json={}, headers=headers) for headers in ({}, wrong)]
        found[path] = [answer.status_code for answer in answers]
    return found


ENDPOINTS = (
    "/generate", "/weights_checker", "/abort_request", "/flush_cache", "/begin_weight_update", "/end_weight_update",
    "/update_weight_version", "/update_weights_from_tensor", "/update_weights_from_disk", "/load_lora_adapter", "/server_info",
)  # fmt: skip


def exposed() -> dict[str, Any]:
    """Addresses that the engines' processes listen on, modes of their Unix sockets, and where a key may be read."""
    addresses, modes, readable = set(), set(), []
    for place in _now[0].engines._places:
        key = place.engine._http.headers["authorization"].removeprefix("Bearer ")
        assert len(key) == 48
        for process in _family(_now[0], place.number):
            if any(key in word for word in process.cmdline()):
                readable.append(f"command line of {process.pid}")
            addresses |= {entry.laddr.ip for entry in process.net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
            for entry in process.net_connections("unix"):
                if entry.laddr and Path(entry.laddr).exists():
                    modes.add(Path(entry.laddr).stat().st_mode & 0o077)
        readable += [str(file) for file in _now[0].folder.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    return {"addresses": addresses, "modes": modes, "readable": readable}
