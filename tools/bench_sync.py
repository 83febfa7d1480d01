"""Measures the sync on this machine's CPUs against plain copies and against the ways of others; prints a table, writes JSON.

    python tools/bench_sync.py [--model NAME] [--train tp=2] [--rollout tp=1] [--repeat N] [--json FILE]

Trainer ranks and engine ranks are processes with random weights in the real layouts. An engine rank is a plain process that runs
`rollout_sglang.rank_handler` and its `WeightReceiver`, the code that runs inside SGLang's scheduler; SGLang itself is not started. Every
process uses one thread. All cases take turns, so that a busy machine slows all of them; the table shows medians.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from sync_baselines import BenchSetup, GatherAndQuantise, PlainCopy, contract, flat_plan, flat_tensors

from megatron_rl.config.sync import Running, SyncConfig
from megatron_rl.errors import MegatronRLError, UserError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.digest import make_stored_tensors
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import scale_name
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Shard
from rollout_sglang import rank_handler
from rollout_sglang.rank_requests import RankRequests

MODELS = {
    "tiny": ModelGeometry(layers=4, hidden=512, heads=8, kv_heads=4, head_dim=128, ffn=1536, vocab=4096, tied=True),
    "0.5gb": ModelGeometry(layers=24, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=4096, vocab=8192, tied=True),
    "32b_slice": ModelGeometry(layers=2, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=4736, tied=False),
    "8b": ModelGeometry(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, tied=False),
    "0.6b": ModelGeometry(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab=151936, tied=True),
}
"""Widths of Qwen3 models. `0.5gb` is one of 0.44 GB of FP8 weights and scales, with a small vocabulary, which stays BF16.
`32b_slice` is a 32nd of Qwen3-32B, 2 of 64 layers and 4,736 of 151,936 words: the bytes of each kind stand as in the whole. `8b` is
Llama-3.1-8B, for tools/gpu_check.sh."""

TRANSPORTS = ("shared_memory", "process_group", "disk")
MB = 1e6


def make_plan(setup: BenchSetup, fp8: bool, settings: SyncConfig) -> SyncPlan:
    return SyncPlan.make(setup.model, setup.train, (setup.rollout_tp, 1), contract(fp8), settings.chunk_bytes)


# --- the engine's side ------------------------------------------------------------------------------------------------------


class EngineModel(torch.nn.Module):
    """Parameters under SGLang's names, which hold dots."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._tensors.items())


def serve_engine_rank(pipe: Connection, setup: BenchSetup, rank: int) -> None:
    """Answers requests like the hook in SGLang's scheduler process, for an FP8 and a BF16 engine of the same model."""

    torch.set_num_threads(1)
    shards = build_engine_shards(setup.model, setup.rollout_tp)[rank]
    models = {fp8: EngineModel(make_empty_tensors(shards, contract(fp8)) | (flat_tensors(setup) if fp8 else {})) for fp8 in (True, False)}
    receivers: dict[str, Any] = {}
    while True:
        try:
            which, fp8, request = pipe.recv()
        except EOFError:
            return
        rank_handler._receiver = receivers.get(which)  # this process plays several engines
        try:
            pipe.send((rank_handler.answer(request, rank, models[fp8]), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
        receivers[which] = rank_handler._receiver


def make_empty_tensors(shards: Sequence[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """Tensors as an engine rank holds them, all ones: every page is there before anything is measured."""
    tensors = make_stored_tensors(shards, contract.fp8_roles, contract.high)
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(1)
    return tensors


class PipeEngine(RankRequests):
    """What `WeightSync` asks of an engine, answered by the processes above. It serves nothing, so there is nothing to pause."""

    def __init__(self, pipes: Sequence[Connection], which: str, fp8: bool) -> None:
        self._pipes, self._which, self._fp8 = pipes, which, fp8

    def pause(self, running: Running) -> None: ...
    def resume(self) -> None: ...
    def begin_sync(self) -> None: ...
    def end_sync(self, version: int) -> None: ...

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        for pipe in self._pipes:
            pipe.send((self._which, self._fp8, request))
        answers = [pipe.recv() for pipe in self._pipes]
        for _, error in answers:
            if error:
                raise RuntimeError(error)
        return [found for found, _ in answers]


# --- the trainer's side -----------------------------------------------------------------------------------------------------


def make_random_tensors(shards: Sequence[Shard], fp8: bool, seed: int) -> dict[str, torch.Tensor]:
    """What `mcore.weights.collect_named_tensors` gives: BF16 tensors, and blocks quantised from them for the FP8 roles."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for shard in shards:
        value = torch.empty(shard.shape, dtype=torch.bfloat16).normal_(generator=generator)
        if fp8 and shard.role in contract(True).fp8_roles:
            found[shard.name], found[scale_name(shard.name)] = quantize_weight(value, "pow2")
        else:
            found[shard.name] = value
    return found


def train_rank(setup: BenchSetup, rank: int, port: int, pipes: Sequence[Connection], results: Any) -> None:
    """One trainer rank: runs all cases in turns; rank 0 puts {case: [seconds]} and {case: bytes} into `results`."""
    torch.set_num_threads(1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    dist.init_process_group("gloo", rank=rank, world_size=setup.train.world_size)
    try:
        cases = BenchCases(setup, rank, pipes)
        cases.run_all()
        if rank == 0:
            results.send((cases.seconds, cases.bytes))
    except MegatronRLError as error:
        if rank == 0:
            results.send(error)
    finally:
        dist.destroy_process_group()


class BenchCases:
    """All that is measured, by name."""

    def __init__(self, setup: BenchSetup, rank: int, pipes: Sequence[Connection]) -> None:
        self.setup, self.rank = setup, rank
        self.named_tensors = {
            fp8: make_random_tensors(build_trainer_shards(setup.model, setup.train, quantized=fp8)[rank], fp8, seed=1)
            for fp8 in (True, False)
        }
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}
        self.syncs: dict[str, WeightSync] = {}
        for transport in TRANSPORTS:
            for fp8 in (True, False):
                name = f"{transport} {'fp8' if fp8 else 'bf16'}"
                settings = SyncConfig(proof="streamed", transport=transport, dir=Path(setup.folder), timeout=120)
                plan, engine = make_plan(setup, fp8, settings), cast(Engine, PipeEngine(pipes, name, fp8))
                self.syncs[name] = WeightSync(plan, engine, partial(self.named_tensors.__getitem__, fp8), settings)
                self.bytes[name] = sum(map(plan.count_bytes, plan.transfers))
        self.named_tensors[True] |= flat_tensors(setup)
        flat = WeightSync(
            flat_plan(setup), cast(Engine, PipeEngine(pipes, "flat", True)), lambda: self.named_tensors[True], SyncConfig(timeout=120)
        )
        self.flat = flat
        self.copy = PlainCopy(self.syncs["shared_memory fp8"].plan, rank, setup.train.world_size)
        self.gathered = GatherAndQuantise(setup, self.named_tensors[False])

    def run_all(self) -> None:
        for turn in range(self.setup.repeat + 1):  # the first turn connects, faults pages in, and rereads everything
            for name, sync in self.syncs.items():
                self._time(name, turn, partial(sync.run, turn))
                if name.endswith("fp8"):
                    self._time(f"{name} unproved", turn, partial(sync.run, turn, hashing=False))
            self._time("reread proof", turn, self.syncs["shared_memory fp8"].prove)
            self._time("plain copy", turn, self.copy.run)
            self._time("plain copy to a process", turn, partial(self.flat.run, turn, hashing=False))
            self._time("gather, convert, quantise", turn, self.gathered.run)
        for sync in (*self.syncs.values(), self.flat):
            sync.close()

    def _time(self, name: str, turn: int, call: Any) -> None:
        dist.barrier()
        start = time.perf_counter()
        call()
        dist.barrier()
        if turn > 0:
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)


# --- the command ------------------------------------------------------------------------------------------------------------


def measure(setup: BenchSetup) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Runs all processes to their end."""
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(setup.rollout_tp)]
    results, told = spawn.Pipe(duplex=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [spawn.Process(target=serve_engine_rank, args=(there, setup, rank)) for rank, (_, there) in enumerate(ends)]
    here = [end for end, _ in ends]
    world = range(setup.train.world_size)
    processes += [spawn.Process(target=train_rank, args=(setup, rank, port, here if rank == 0 else [], told)) for rank in world]
    for process in processes:
        process.start()
    told.close()
    for _, there in ends:
        there.close()
    try:
        answer = results.recv()
    except EOFError:
        raise UserError("bench_sync", None, "a process ended early", "see above") from None
    finally:
        for process in processes:
            process.join(1)
            process.kill()
            process.join()
    if isinstance(answer, MegatronRLError):
        raise answer
    return answer


def summary(seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Medians by case, and what they say."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    size, copy, found = sizes["shared_memory fp8"], median["plain copy"], {}
    for transport in TRANSPORTS:
        took, unproved = median[f"{transport} fp8"], median[f"{transport} fp8 unproved"]
        found[transport] = {
            "of plain copy in one process": copy / unproved,
            "of plain copy to a process": median["plain copy to a process"] / unproved,
            "of plain copy in one process, proof included": copy / took,
            "of plain copy to a process, proof included": median["plain copy to a process"] / took,
            "against gather, convert, quantise": median["gather, convert, quantise"] / took,
            "fp8 against bf16": median[f"{transport} bf16"] / took,
            "proof's share": 1 - unproved / took,
        }
    cases = {
        name: {"seconds": value, "min": min(seconds[name]), "max": max(seconds[name]), "bytes": sizes.get(name, size)}
        for name, value in median.items()
    }
    return {"cases": cases, "ratios": found}


def show(console: Console, found: Mapping[str, Any]) -> None:
    table = Table("case", "MB", "ms (min - max)", "GB/s", title="medians")
    for name, case in found["cases"].items():
        shown = f"{case['seconds'] * 1e3:.0f} ({case['min'] * 1e3:.0f} - {case['max'] * 1e3:.0f})"
        table.add_row(name, f"{case['bytes'] / MB:.0f}", shown, f"{case['bytes'] / case['seconds'] / 1e9:.2f}")
    console.print(table)
    names = next(iter(found["ratios"].values()))
    table = Table("ratio", *found["ratios"])
    for name in names:
        table.add_row(name, *(f"{ratios[name]:.2f}" for ratios in found["ratios"].values()))
    console.print(table)


def _sizes(option: str, text: str, allowed: Sequence[str]) -> dict[str, int]:
    """`tp=2,pp=2` as a dictionary."""
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in allowed or not value.isdigit() or int(value) < 1:
            raise UserError(option, text, f"must be like {','.join(f'{name}=2' for name in allowed)}")
        found[name] = int(value)
    return found


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "0.5gb",
    train: Annotated[str, typer.Option(help="trainer layout: tp, pp, dp")] = "tp=2",
    rollout: Annotated[str, typer.Option(help="engine layout: tp")] = "tp=1",
    repeat: Annotated[int, typer.Option(help="turns that count")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
) -> None:
    try:
        if model not in MODELS:
            raise UserError("--model", model, f"is not one of {', '.join(MODELS)}")
        with tempfile.TemporaryDirectory() as folder:
            layout = Layout(**_sizes("--train", train, ["tp", "pp", "dp"]))
            setup = BenchSetup(MODELS[model], layout, _sizes("--rollout", rollout, ["tp"])["tp"], repeat, folder)
            make_plan(setup, True, SyncConfig())  # refuses a layout that does not fit before anything is started
            found = summary(*measure(setup))
    except MegatronRLError as error:
        print(f"bench_sync: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    console = Console()
    console.print(f"model {model}, trainer {train}, engine {rollout}, {os.cpu_count()} cores, {repeat} turns")
    show(console, found)
    if json_file:
        json_file.write_text(json.dumps({"model": model, "train": train, "rollout": rollout, "cores": os.cpu_count(), **found}, indent=1))


if __name__ == "__main__":
    typer.run(main)
