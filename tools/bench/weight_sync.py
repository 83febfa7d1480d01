"""Measure the weight sync on this machine against plain copies and against the common method; print a table, write JSON.

    python tools/bench/weight_sync.py [--model NAME] [--train tp=2] [--rollout tp=1] [--repeat N] [--json FILE]
    python tools/bench/weight_sync.py --device cuda --model 8b --train tp=1 --transports cuda_ipc --bucket-mb 256,64,16

Trainer ranks and engine ranks are processes with random weights in the real layouts. An engine rank is a plain process that runs
`rollout_sglang.rank_handler` and its `WeightReceiver`, the code that runs inside SGLang's scheduler; SGLang itself is not started. Every
process uses one thread. All cases take turns, so that a busy machine slows all of them; the table shows medians. On a GPU, where memory is
short, the cases in BF16 and the plain copy to another process are left out.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import typer
import xxhash
from rich.console import Console
from rich.table import Table
from weight_sync_baselines import BenchSetup, GatherAndQuantize, PlainCopy, make_contract, make_flat_plan, make_flat_tensors
from weight_sync_engine import PipeEngine, serve_engine_rank

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import MegatronRLError, UserError
from megatron_rl.precision.quantizers import quantize
from megatron_rl.sync.weight_sync import WeightSync
from parallel.layout import Layout, parse_sizes
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError
from parallel.transport import TRANSPORTS, load_transport
from parallel.transport.process_group import listening_store

_QWEN3 = functools.partial(ModelGeometry, "qwen3", head_dim=128, qk_norm=True)
MODELS = {
    "tiny": _QWEN3(layers=4, hidden=512, heads=8, kv_heads=4, ffn=1536, vocab=4096, tied=True),
    "0.5gb": _QWEN3(layers=24, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=8192, tied=True),
    "32b_slice": _QWEN3(layers=2, hidden=5120, heads=64, kv_heads=8, ffn=25600, vocab=4736),
    "8b": _QWEN3(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "0.6b": _QWEN3(layers=28, hidden=1024, heads=16, kv_heads=8, ffn=3072, vocab=151936, tied=True),
}
"""Widths of Qwen3 models. `0.5gb` is one of 0.44 GB of FP8 weights and scales, with a small vocabulary, which stays BF16.
`32b_slice` is a 32nd of Qwen3-32B, 2 of 64 layers and 4,736 of 151,936 words: the bytes of each kind stand as in the whole. `8b` is
Llama-3.1-8B, for the GPU check."""

ON_CPU = [name for name in TRANSPORTS.builtin if "cpu" in load_transport(name).devices]
MB = 1e6
_WAIT_SECONDS = 600


def make_random_tensors(setup: BenchSetup, rank: int, fp8: bool) -> dict[str, torch.Tensor]:
    """Return what `collect_named_tensors` gives: BF16 tensors, and E4M3 with scales quantized from them for the FP8 roles."""
    tensors, format_of = {}, make_contract(fp8).format_of
    for number, shard in enumerate(build_trainer_shards(setup.model, setup.train, format_of=format_of)[rank]):
        value = torch.empty(shard.shape, dtype=torch.bfloat16)
        value.normal_(generator=torch.Generator(value.device).manual_seed((1 << 32) + number))
        format = format_of(shard.role)
        if format.quantized:
            tensors[shard.name], tensors[format.scale_name(shard.name)] = quantize(value, format)
        else:
            tensors[shard.name] = value
    return tensors


def run_trainer_rank(setup: BenchSetup, rank: int, port: int, pipes: Sequence[Connection], results: Any) -> None:
    """Run all cases in turns; rank 0 sends ({case: [seconds]}, {case: bytes}), or an expected error, to `results`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "gloo" if setup.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=setup.train.world_size)
    try:
        with torch.device(setup.device):
            cases = BenchCases(setup, rank, pipes)
        cases.run_all()
        if rank == 0:
            results.send((cases.seconds, cases.bytes))
    except MegatronRLError as error:
        if rank == 0:
            results.send(error)
    finally:
        dist.destroy_process_group()


CHANGED = {"1e-6": (0.0007, 0.0032), "1e-5": (0.005, 0.023), "1e-4": (0.031, 0.136)}
"""Learning rate -> shares of the bytes of E4M3 and of BF16 that a step of Adam changes (tools/studies/first_steps.py changed)."""


class SmallSteps:
    """Changes as few bytes of tensors, in place, as an optimizer step at a learning rate."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rate: str) -> None:
        random = torch.Generator().manual_seed(0)
        self._flips = []
        for tensor in tensors.values():
            flat = tensor.view(torch.uint8).view(-1)
            count = int(flat.numel() * CHANGED[rate][tensor.dtype is torch.bfloat16])
            if tensor.dtype is not torch.float32:  # hardly a scale changes
                self._flips.append((flat, torch.randint(0, flat.numel(), (count,), generator=random).unique()))

    def step(self) -> None:
        for flat, places in self._flips:
            flat[places] ^= 1


class BenchCases:
    """All that is measured, by name."""

    def __init__(self, setup: BenchSetup, rank: int, pipes: Sequence[Connection]) -> None:
        self.setup = setup
        self.named_tensors = {fp8: make_random_tensors(setup, rank, fp8) for fp8 in (True, False)}
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}
        self.syncs: list[WeightSync] = []
        self.calls: dict[str, Callable[[int], object]] = {}
        """Case -> what is timed, unless it returns seconds itself; it takes the number of the turn."""
        self.preparations: dict[str, Callable[[int], object]] = {}
        """Case -> what is done before it, untimed."""
        for name, settings in setup.sync_configs().items():
            for fp8 in setup.precisions():
                case = f"{name} {'fp8' if fp8 else 'bf16'}"
                plan, engine = setup.make_plan(fp8, settings), Rank0[Any](partial(PipeEngine, pipes, case, fp8))
                self.syncs.append(sync := WeightSync(plan, engine, partial(self.named_tensors.__getitem__, fp8), settings))
                self.bytes[case] = sum(transfer.nbytes for transfer in plan.transfers)
                self.calls[case] = sync.run
                if fp8:
                    self.calls[f"{case} unproved"] = partial(sync.run, hashing=False)
                    self.calls[f"{case} until it samples"] = partial(time_until_it_samples, sync)
                    streamed = settings.model_copy(update={"proof": "streamed"})
                    engine = Rank0[Any](partial(PipeEngine, pipes, f"{case} streamed", fp8))
                    self.syncs.append(sync := WeightSync(plan, engine, partial(self.named_tensors.__getitem__, fp8), streamed))
                    self.calls[f"{case} hashed while it is sent"] = sync.run
            if setup.device == "cpu":
                self._add_deltas(name, settings, pipes)
        proved = self.syncs[0]  # in FP8
        copy, gathered = PlainCopy(proved.plan, rank, setup.train.world_size), GatherAndQuantize(setup, self.named_tensors[False])
        self.calls["proof"] = lambda turn: proved.run(turn).proof_seconds
        self.calls["both sides hashed again"] = lambda turn: proved.prove()
        self.calls["plain copy"] = lambda turn: copy.run()
        if setup.device == "cpu":
            tensors = self.named_tensors[True] = self.named_tensors[True] | make_flat_tensors(setup)
            engine = Rank0[Any](partial(PipeEngine, pipes, "flat", True))
            self.syncs.append(flat := WeightSync(make_flat_plan(setup), engine, lambda: tensors, SyncConfig(timeout=120)))
            self.calls["plain copy to a process"] = partial(flat.run, hashing=False)
        self.calls["gather, convert, quantise"] = lambda turn: gathered.run()

    def _add_deltas(self, name: str, settings: SyncConfig, pipes: Sequence[Connection]) -> None:
        """Add syncs after small steps, of which only what changed is sent; before each, one untimed brings the engine up to date."""
        settings = settings.model_copy(update={"delta": "on"})
        plan, engine = self.setup.make_plan(True, settings), Rank0[Any](partial(PipeEngine, pipes, f"{name} delta", True))
        self.syncs.append(sync := WeightSync(plan, engine, partial(self.named_tensors.__getitem__, True), settings))

        def prepare(steps: SmallSteps, turn: int) -> None:
            sync.run(turn)
            steps.step()

        def run(case: str, turn: int) -> None:
            self.bytes[case] = sync.run(turn).bytes

        for rate in CHANGED:
            case = f"{name} fp8, delta at {rate}"
            self.preparations[case] = partial(prepare, SmallSteps(self.named_tensors[True], rate))
            self.calls[case] = partial(run, case)

    def run_all(self) -> None:
        """Time every case `repeat` times. The turn before them connects, faults pages in, and rereads everything."""
        for turn in range(self.setup.repeat + 1):
            for case, call in self.calls.items():
                self._time(case, turn, call)
        for sync in self.syncs:
            sync.close()

    def _time(self, case: str, turn: int, call: Callable[[int], object]) -> None:
        if case in self.preparations:
            self.preparations[case](turn)
        self._wait()
        start = time.perf_counter()
        seconds = call(turn)
        self._wait()
        if turn > 0:
            self.seconds.setdefault(case, []).append(seconds if isinstance(seconds, float) else time.perf_counter() - start)

    def _wait(self) -> None:
        """Wait for the device and for the other trainer ranks."""
        if self.setup.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def time_until_it_samples(sync: WeightSync, turn: int) -> float:
    """Return the seconds from the start of a sync to the moment when the engine samples with the new weights, before they are proved."""
    start, sampling_at = time.perf_counter(), list[float]()
    sync.run(turn, meanwhile=lambda: sampling_at.append(time.perf_counter()))
    return sampling_at[0] - start


def measure(setup: BenchSetup) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Run all processes to their end; return {case: [seconds]} and {case: bytes}."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(setup.rollout_tp)]
    results, result_sender = spawn.Pipe(duplex=False)
    store = listening_store("127.0.0.1", _WAIT_SECONDS)
    processes = [spawn.Process(target=serve_engine_rank, args=(engine_end, setup, rank)) for rank, (_, engine_end) in enumerate(pipes)]
    for rank in range(setup.train.world_size):
        trainer_ends = [trainer_end for trainer_end, _ in pipes] if rank == 0 else []
        processes.append(spawn.Process(target=run_trainer_rank, args=(setup, rank, store.port, trainer_ends, result_sender)))
    for process in processes:
        process.start()
    result_sender.close()
    for _, engine_end in pipes:
        engine_end.close()
    try:
        answer = results.recv()
    except EOFError:
        raise UserError("weight_sync", None, "a process ended early", "see above") from None
    finally:
        for process in processes:
            process.join(1)
            process.kill()
            process.join()
    if isinstance(answer, MegatronRLError):
        raise answer
    return answer


def measure_hash_floor() -> str:
    """Return how fast a core copies, and hashes what its cache holds, and what share of a copy with a hash the hash is."""
    pieces, target = np.ones((256, 256 << 10), np.uint8), np.ones(256 << 10, np.uint8)

    def best(work: Callable[[np.ndarray], object]) -> float:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            for piece in pieces:
                work(piece)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    copy, cached = best(lambda piece: np.copyto(target, piece)), best(lambda _: xxhash.xxh3_128(target.data))
    rates = (
        f"XXH3 of 256 KiB in the cache {pieces.nbytes / cached / 1e9:.0f} GB/s, a copy from memory {pieces.nbytes / copy / 1e9:.1f} GB/s"
    )
    return (
        f"{rates}: on the core that copies, hashing is {cached / (copy + cached):.0%}; 5 % needs {19 * pieces.nbytes / copy / 1e9:.0f} GB/s"
    )


def summarize(setup: BenchSetup, seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return medians by case, and their ratios by setting."""
    median = {case: statistics.median(values) for case, values in seconds.items()}
    ratios = {}
    for name in setup.sync_configs():
        proved, unproved = median[f"{name} fp8"], median[f"{name} fp8 unproved"]
        compared = {
            "of plain copy in one process": ("plain copy", unproved),
            "of plain copy to a process": ("plain copy to a process", unproved),
            "of plain copy in one process, proof included": ("plain copy", proved),
            "of plain copy to a process, proof included": ("plain copy to a process", proved),
            "against gather, convert, quantise": ("gather, convert, quantise", proved),
            "fp8 against bf16": (f"{name} bf16", proved),
        }
        ratios[name] = {ratio: median[case] / of_sync for ratio, (case, of_sync) in compared.items() if case in median}
        for rate in CHANGED:
            if (case := f"{name} fp8, delta at {rate}") in median:
                ratios[name][f"delta at {rate} against everything"] = proved / median[case]
                ratios[name][f"delta at {rate}, share of the bytes"] = sizes[case] / sizes[f"{name} fp8"]
        ratios[name]["proof's share if nothing is sampled meanwhile"] = 1 - unproved / proved
        ratios[name]["proof's share until it samples"] = 1 - unproved / median[f"{name} fp8 until it samples"]
    size = next(size for case, size in sizes.items() if case.endswith("fp8"))
    cases = {
        case: {"seconds": value, "min": min(seconds[case]), "max": max(seconds[case]), "bytes": sizes.get(case, size)}
        for case, value in median.items()
    }
    return {"cases": cases, "ratios": ratios}


def show(console: Console, report: Mapping[str, Any]) -> None:
    table = Table("case", "MB", "ms (min - max)", "GB/s", title="medians")
    for name, case in report["cases"].items():
        milliseconds = f"{case['seconds'] * 1e3:.0f} ({case['min'] * 1e3:.0f} - {case['max'] * 1e3:.0f})"
        table.add_row(name, f"{case['bytes'] / MB:.0f}", milliseconds, f"{case['bytes'] / case['seconds'] / 1e9:.2f}")
    console.print(table)
    table = Table("ratio", *report["ratios"])
    for name in next(iter(report["ratios"].values())):
        table.add_row(name, *(f"{ratios[name]:.3g}" for ratios in report["ratios"].values()))
    console.print(table)


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "0.5gb",
    train: Annotated[str, typer.Option(help="trainer layout: tp, pp, dp")] = "tp=2",
    rollout: Annotated[str, typer.Option(help="engine layout: tp")] = "tp=1",
    repeat: Annotated[int, typer.Option(help="turns that count")] = 5,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="where the weights are")] = "cpu",
    transports: Annotated[str, typer.Option(help="values of sync.transport")] = ",".join(ON_CPU),
    bucket_mb: Annotated[str, typer.Option(help="values of sync.bucket_mb")] = str(SyncConfig().bucket_mb),
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
) -> None:
    """Measure and print."""
    try:
        if model not in MODELS:
            raise UserError("--model", model, f"is not one of {', '.join(MODELS)}")
        layout = Layout(**parse_sizes("--train", train, ["tp", "pp", "dp"]))
        tp = parse_sizes("--rollout", rollout, ["tp"])["tp"]
        sizes = [int(size) for size in bucket_mb.split(",")]
        with tempfile.TemporaryDirectory() as folder:
            setup = BenchSetup(MODELS[model], layout, tp, repeat, Path(folder), device, transports.split(","), sizes)
            setup.make_plan(True, SyncConfig())  # refuses a layout that does not fit before anything is started
            report = summarize(setup, *measure(setup))
    except (MegatronRLError, GeometryError) as error:
        print(f"weight_sync: {error}", file=sys.stderr)
        raise typer.Exit(getattr(error, "exit_code", 2)) from None
    console = Console()
    console.print(f"model {model}, trainer {train}, engine {rollout}, {os.cpu_count()} cores, {repeat} turns")
    show(console, report)
    console.print(measure_hash_floor())
    if json_file:
        json_file.write_text(json.dumps({"model": model, "train": train, "rollout": rollout, "cores": os.cpu_count(), **report}, indent=1))


if __name__ == "__main__":
    typer.run(main)
