"""Faults of real and fake engines: kills, hangs, broken connections, failed starts."""

import json
import os
import socket
import threading
import time
from dataclasses import asdict
from unittest import mock

import httpx
import psutil

from megatron_rl.distributed import run_on_rank0
from parallel.transport.pack import ChunkPacker
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.rank_handler import PREFIX
from support.processes import alive_after, family, until


def engine_family(engines, number):
    """Return an engine's servers and the processes below them, the first node's first."""
    return [process for pid in engines.replicas[number].engine.server.processes.pids for process in family(pid)]


def strike_while(work, kind, engines, sync, version, faults):
    """Do rank 0's `work`, whose result is of type `kind`, as the loop does, with faults in engines once they are busy. Return the `result`,
    and the pids of the lost engines' processes that still run (`left`)."""
    processes = [process for number in faults for process in engine_family(engines, number)]

    def strike():
        until(lambda: all(engines.replicas[number].outstanding for number in faults), 120, "every engine is at work")
        time.sleep(0.3)  # it has begun
        for number, fault in faults.items():
            _FAULTS[fault](engines, number)

    striking = threading.Thread(target=strike)
    striking.start()
    result = sync.run_with_recovery(version, lambda: run_on_rank0(work, kind))
    striking.join()
    return {"result": result, "left": [process.pid for process in alive_after(processes, 10)]}


def sync_through(engines, sync, version, faults):
    """Run a sync with faults in engines while rank 0 packs the third chunk. Collective."""
    pack, calls = ChunkPacker.pack, []

    def strike_and_pack(packer, *args):
        calls.append(1)
        if len(calls) == 3:
            engines.run_local(lambda engines: [_FAULTS[fault](engines, number) for number, fault in faults.items()])
        return pack(packer, *args)

    with mock.patch.object(ChunkPacker, "pack", strike_and_pack):
        return asdict(sync.run(version))


def strike_at_call(work, engines, number, call, fault):
    """Do `work` with a fault of the engine before it is asked `call` for the first time: a path, or a verb of its ranks. Collective."""
    request, struck = SGLangEngine._request, []

    def strike_and_ask(engine, path, body, *args, **named):
        asked = json.loads(body["action"].removeprefix(PREFIX))["verb"] if path == "/weights_checker" else path
        if asked == call and not struck and engine is engines.value.replicas[number].engine:
            struck.append(_FAULTS[fault](engines.value, number))
        return request(engine, path, body, *args, **named)

    with mock.patch.object(SGLangEngine, "_request", strike_and_ask):
        return work(), len(struck)


def _last_node(engines, number):
    return family(engines.replicas[number].engine.server.processes.pids[-1])


def _suspend(processes):
    for process in processes:
        process.suspend()


def _cut_requests(engines, number):
    """Shut down the connections of requests to the engine."""
    port = httpx.URL(engines.replicas[number].engine.server.url).port
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as client:
                client.shutdown(socket.SHUT_RDWR)


_FAULTS = {
    "kill": lambda engines, number: engine_family(engines, number)[0].kill(),
    "kill last node": lambda engines, number: _last_node(engines, number)[0].kill(),
    "hang": lambda engines, number: _suspend(engine_family(engines, number)),
    "hang last node": lambda engines, number: _suspend(_last_node(engines, number)),
    "cut requests": _cut_requests,
}
"""What happens to an engine. `faults` map numbers of engines to these names."""
