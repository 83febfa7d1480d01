"""Part `speed_sync`: the sync by CUDA IPC to another process on the same GPU, against one flat copy of as many bytes within the device.

The other process runs `rollout_sglang.live`, the code that runs in SGLang's scheduler; SGLang itself is not started (part `bridge` does).
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
import torch.distributed as dist
from bench_sync import MODELS, Model, PlainEngine, empty_planes, plan_of
from sync_baselines import Setup, contract

from gpu_parts.rows import Rows, run_part
from gpu_parts.speed_layer import timed
from megatron_rl.config_sync import Sync
from megatron_rl.engine import Engine
from megatron_rl.sync import WeightSync
from parallel.layout import Layout
from parallel.megatron import trainer_shards
from parallel.sglang import engine_shards
from rollout_sglang import live

_NAME = "gpu"


def part(rows: Rows) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        measure(rows, "0.5gb", Sync(transport="cuda_ipc", proof="streamed", timeout=25.0), "cuda", repeat=5)
    finally:
        dist.destroy_process_group()


def measure(rows: Rows, model: str, settings: Sync, device: str, repeat: int) -> None:
    """Medians of `repeat` syncs after one that connects, with the proof and without, and of the copy."""
    setup = Setup(MODELS[model], Layout(), 1, repeat, "")
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    engine = spawn.Process(target=serve, args=(there, setup, device), daemon=True)
    engine.start()
    there.close()
    planes = empty_planes(trainer_shards(setup.model, setup.train)[0], contract(True))
    planes = {name: random_bytes(plane.to(device)) for name, plane in planes.items()}
    plan = plan_of(setup, True, settings)
    sync = WeightSync(plan, cast(Engine, PlainEngine([here], _NAME, True)), lambda: planes, settings)
    size = sum(map(plan.bytes_of, plan.moves))
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    cases: dict[str, Callable[[], object]] = {
        "sync": partial(sync.run, 1, hashing=False),
        "sync with the streamed proof": partial(sync.run, 1),
        "copy on the device": partial(target.copy_, source),
    }
    try:
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        for turn in range(repeat + 1):
            for case, call in cases.items():
                took = timed(call)
                if turn:
                    seconds[case].append(took)
        tell(rows, f"{settings.transport}, model {model}", size, {case: statistics.median(values) for case, values in seconds.items()})
    finally:
        sync.close()
        here.close()
        engine.join(5)
        engine.kill()


def random_bytes(plane: torch.Tensor) -> torch.Tensor:
    """Filled in place, so that the proof says something; nobody computes with them."""
    plane.view(torch.uint8).random_(0, 256)
    return plane


def tell(rows: Rows, where: str, size: int, seconds: dict[str, float]) -> None:
    """One row per case."""
    for case, took in seconds.items():
        ratio = seconds["copy on the device"] / took
        told = f"{size / 1e6:.0f} MB in {took * 1e3:.2f} ms, {size / took / 1e9:.1f} GB/s, {ratio:.3f} of the copy's speed"
        rows.add(f"{where}: {case}", told, None, bytes=size, seconds=took, of_copy=ratio)


def serve(pipe: Connection, setup: Setup, device: str) -> None:
    """The engine's side: tensors under SGLang's names, filled by the real receiver."""
    held = Model({name: plane.to(device) for name, plane in empty_planes(engine_shards(setup.model, 1)[0], contract(True)).items()})
    while True:
        try:
            _, _, request = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, str | None] = (live.answer(request, 0, held), None)
        except Exception as error:
            answer = (None, f"{type(error).__name__}: {error}")
        pipe.send(answer)


if __name__ == "__main__":
    run_part(part)
