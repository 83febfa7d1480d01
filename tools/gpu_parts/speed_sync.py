"""Part `speed_sync`: the sync of an 8B model by CUDA IPC to another process on the same GPU, with several sizes of chunks, against one flat
copy of as many bytes within the device and against gathering BF16, converting and quantising anew; and what the proof takes of it.

The other process runs `rollout_sglang.rank_handler`, the code that runs in SGLang's scheduler; SGLang itself is not started (part
`bridge` does).
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
import torch.distributed as dist
from bench_sync import MODELS, EngineModel, PipeEngine, make_empty_tensors, make_plan
from sync_baselines import BenchSetup, GatherAndQuantise, contract

from gpu_parts.rows import Rows, run_part
from gpu_parts.speed_layer import timed
from gpu_parts.targets import add
from megatron_rl.config.sync import SyncConfig
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.weight_sync import WeightSync
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.sglang_shards import build_engine_shards
from rollout_sglang import rank_handler

_NAME = "gpu"


BUCKETS_MB = (256, 64, 16)
"""`sync.bucket_mb`, a chunk is half of it: the last one's chunks stay in the GPU's cache between writer and reader, and are many."""
_COPY, _BARE, _PROVED = "copy on the device", "sync without its proof", "sync with the streamed proof"


def part(rows: Rows) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        settings = [SyncConfig(transport="cuda_ipc", proof="streamed", timeout=25.0, bucket_mb=size) for size in BUCKETS_MB]
        measure(rows, "8b", settings, "cuda", repeat=3)
    finally:
        dist.destroy_process_group()


def measure(rows: Rows, model: str, settings: Sequence[SyncConfig], device: str, repeat: int) -> None:
    """All cases with each of the settings, one after the other, to one process that plays the engine."""
    setup = BenchSetup(MODELS[model], Layout(), 1, repeat, "")
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    engine = spawn.Process(target=serve, args=(there, setup, device), daemon=True)
    engine.start()
    there.close()
    try:
        with torch.device(device):
            named_tensors = make_empty_tensors(build_trainer_shards(setup.model, setup.train)[0], contract(True))
            high = make_empty_tensors(build_trainer_shards(setup.model, setup.train, quantized=False)[0], contract(False))
        named_tensors = {name: random_bytes(tensor) for name, tensor in named_tensors.items()}
        gathered = GatherAndQuantise(setup, high)
        for one in settings:
            where = f"{one.transport}, model {model}, bucket_mb {one.bucket_mb}"
            with rows.guarded(where):
                sync = WeightSync(make_plan(setup, True, one), cast(Engine, PipeEngine([here], _NAME, True)), lambda: named_tensors, one)
                try:
                    size = sum(map(sync.plan.count_bytes, sync.plan.transfers))
                    tell(rows, where, size, medians(sync, gathered, size, device, repeat))
                finally:
                    sync.close()
    finally:
        here.close()
        engine.join(5)
        engine.kill()


def medians(sync: WeightSync, gathered: GatherAndQuantise, size: int, device: str, repeat: int) -> dict[str, float]:
    """Seconds by case: medians of `repeat` turns after one that connects."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    cases: dict[str, Callable[[], object]] = {
        _BARE: partial(sync.run, 1, hashing=False),
        _PROVED: partial(sync.run, 1),
        "both sides hashed once more": sync.prove,
        _COPY: partial(target.copy_, source),
        "gather, convert, quantise": gathered.run,
    }
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for turn in range(repeat + 1):
        for case, call in cases.items():
            took = timed(call)
            if turn:
                seconds[case].append(took)
    return {case: statistics.median(values) for case, values in seconds.items()}


def random_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Filled in place, so that the proof says something; nobody computes with them."""
    tensor.view(torch.uint8).random_(0, 256)
    return tensor


def tell(rows: Rows, where: str, size: int, seconds: dict[str, float]) -> None:
    """One row per case, and one for the proof's share."""
    for case, took in seconds.items():
        ratio, numbers = seconds[_COPY] / took, {"bytes": size, "seconds": took}
        told = f"{size / 1e6:.0f} MB in {took * 1e3:.2f} ms, {size / took / 1e9:.1f} GB/s, {ratio:.3f} of the copy's speed"
        if case == _BARE:
            add(rows, "sync", f"{where}: {case}", told, ratio, **numbers, of_copy=ratio)
        else:
            rows.add(f"{where}: {case}", told, None, **numbers, of_copy=ratio)
    proof, common = 1 - seconds[_BARE] / seconds[_PROVED], seconds["gather, convert, quantise"] / seconds[_PROVED]
    rows.add(f"{where}: the proof's share", f"{proof:.1%} of the sync's time", None, share=proof)
    rows.add(f"{where}: against gathering, converting, quantising", f"{common:.2f} times as fast, proof included", None, ratio=common)


def serve(pipe: Connection, setup: BenchSetup, device: str) -> None:
    """The engine's side: tensors under SGLang's names, filled by the real receiver."""
    with torch.device(device):
        held = EngineModel(make_empty_tensors(build_engine_shards(setup.model, 1)[0], contract(True)))
    while True:
        try:
            _, _, request = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, str | None] = (rank_handler.answer(request, 0, held), None)
        except Exception as error:
            answer = (None, f"{type(error).__name__}: {error}")
        pipe.send(answer)


if __name__ == "__main__":
    run_part(part)
