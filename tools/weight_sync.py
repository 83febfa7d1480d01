"""Measure the weight sync on this machine against a plain copy within one process.

    python tools/weight_sync.py [--model NAME] [--train tp=2] [--rollout tp=1] [--repeat N] [--json FILE]
    python tools/weight_sync.py --device cuda --model 8b --train tp=1 --transports cuda_ipc --bucket-mb 256,64,16

Trainer ranks and engine ranks are processes with random weights in the real layouts and one thread each. An engine rank runs
`rollout_sglang.rank_handler` and its `WeightReceiver`, the code that runs inside SGLang's scheduler, without SGLang. The cases take turns,
so that a busy machine slows all of them alike, and the table shows medians. On a GPU, where memory is short, BF16 is left out.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from harness import EngineRankStub, EngineStub, JsonFile, parse_names, parse_numbers, parse_sizes, run_on_ranks, write_json
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.main import run_script
from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import as_user_error
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import quantize
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.attention import SoftmaxAttention
from parallel.digest import make_stored_tensors
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_engine_shards
from parallel.transport import TRANSPORTS, load_transport


def _qwen3(layers: int, heads: int, kv_heads: int, **widths: Any) -> ModelGeometry:
    return ModelGeometry("qwen3", (SoftmaxAttention(heads, kv_heads, 128, qk_norm=True),) * layers, **widths)


MODELS = {
    "tiny": _qwen3(layers=4, hidden=512, heads=8, kv_heads=4, ffn=1536, vocab=4096, tied=True),
    "0.5gb": _qwen3(layers=24, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=8192, tied=True),
    "32b_slice": _qwen3(layers=2, hidden=5120, heads=64, kv_heads=8, ffn=25600, vocab=4736),
    "8b": _qwen3(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "0.6b": _qwen3(layers=28, hidden=1024, heads=16, kv_heads=8, ffn=3072, vocab=151936, tied=True),
}
"""Geometries of Qwen3 models. `0.5gb` has 0.44 GB of FP8 weights and scales and a small vocabulary, which stays BF16. `32b_slice` is 1/32
of Qwen3-32B (2 of 64 layers, 4,736 of 151,936 words), with the same proportions of FP8 and BF16 bytes. `8b` has the sizes of Llama-3.1-8B;
the GPU check uses it."""
ON_CPU = [name for name in TRANSPORTS.builtin if "cpu" in load_transport(name).devices]
MB = 1e6


@dataclass(frozen=True)
class BenchSetup:
    """The measured setup; every process receives a copy."""

    model: ModelGeometry
    train: Layout
    rollout_tp: int
    repeat: int
    folder: Path
    """Folder of the transport `disk`."""
    device: str
    transports: Sequence[str]
    bucket_mb: Sequence[int]

    def sync_configs(self) -> dict[str, SyncConfig]:
        """Return the sync settings to measure. A name is the transport, with the bucket size if there are several."""
        return {
            f"{transport} {size} MiB" if len(self.bucket_mb) > 1 else transport: SyncConfig.model_validate(
                {"transport": transport, "dir": self.folder, "timeout": 120.0, "bucket_mb": size, "delta": "off"}
            )
            for transport in self.transports
            for size in self.bucket_mb
        }

    def precisions(self) -> tuple[bool, ...]:
        """Return the measured precisions: True for FP8, False for BF16."""
        return (True, False) if self.device == "cpu" else (True,)

    def make_plan(self, fp8: bool, settings: SyncConfig) -> SyncPlan:
        """Raise GeometryError if the layouts do not fit the model."""
        return SyncPlan.make(self.model, self.train, EngineLayout(self.rollout_tp), make_contract(fp8), settings.chunk_bytes)


def make_contract(fp8: bool) -> PrecisionContract:
    return PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified" if fp8 else "bf16"))


class PlainCopy:
    """Copies the same bytes within one process, tensor by tensor, with `copy_`. The trainer ranks share the work."""

    def __init__(self, plan: SyncPlan, rank: int, world: int) -> None:
        sizes: Counter[tuple[int, str]] = Counter()
        for transfer in plan.transfers:
            if transfer.target_rank % world == rank:
                sizes[transfer.target_rank, transfer.target] += transfer.nbytes
        self._pairs = [(torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)) for size in sizes.values()]

    def run(self) -> None:
        for source, target in self._pairs:
            target.copy_(source)


class PipeEngine(EngineStub):
    """An engine whose ranks are processes at the other end of pipes."""

    def __init__(self, pipes: Sequence[Connection], case: str, fp8: bool) -> None:
        self._pipes, self._case, self._fp8 = pipes, case, fp8

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        for pipe in self._pipes:
            pipe.send((self._case, self._fp8, request))
        answers = [pipe.recv() for pipe in self._pipes]
        for _, error in answers:
            if error:
                raise RuntimeError(error)
        return [answer for answer, _ in answers]


def serve_engine_rank(pipe: Connection, setup: BenchSetup, rank: int) -> None:
    """Answer sync requests of all cases. On CPUs, the process holds both an FP8 and a BF16 copy of the model."""
    torch.set_num_threads(1)
    shards = build_engine_shards(setup.model, setup.rollout_tp)[rank]
    with torch.device(setup.device):
        tensors = {fp8: make_stored_tensors(shards, make_contract(fp8).format_of) for fp8 in setup.precisions()}
        for tensor in [tensor for own in tensors.values() for tensor in own.values()]:
            tensor.view(torch.uint8).fill_(1)  # touches every page before anything is measured
    stubs: dict[str, EngineRankStub] = {}
    while True:
        try:
            case, fp8, request = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((stubs.setdefault(case, EngineRankStub(shards, tensors[fp8])).answer(request, rank), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


def make_random_tensors(setup: BenchSetup, rank: int, fp8: bool) -> dict[str, torch.Tensor]:
    """Return random tensors in the form that `collect_named_tensors` returns: BF16, or E4M3 with scales for the FP8 roles."""
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


class BenchCases:
    def __init__(self, setup: BenchSetup, rank: int, pipes: Sequence[Connection]) -> None:
        self.setup, self._pipes = setup, pipes
        self.named_tensors = {fp8: make_random_tensors(setup, rank, fp8) for fp8 in setup.precisions()}
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}
        self.syncs: list[WeightSync] = []
        self.calls: dict[str, Callable[[int], object]] = {}
        """Case -> function of the turn's number. It is timed, unless it returns seconds itself."""
        for name, settings in setup.sync_configs().items():
            self._add_syncs(name, settings)
        proved = self.syncs[0]
        copy = PlainCopy(proved.plan, rank, setup.train.world_size)
        self.calls["proof"] = lambda turn: proved.run(turn).proof_seconds
        self.calls["both sides hashed again"] = lambda turn: proved.prove()
        self.calls["plain copy"] = lambda turn: copy.run()

    def _make_sync(self, case: str, fp8: bool, settings: SyncConfig) -> WeightSync:
        engine = Rank0[Any](partial(PipeEngine, self._pipes, case, fp8))
        self.syncs.append(sync := WeightSync(self.setup.make_plan(fp8, settings), engine, lambda: self.named_tensors[fp8], settings))
        return sync

    def _add_syncs(self, name: str, settings: SyncConfig) -> None:
        for fp8 in self.setup.precisions():
            case = f"{name} {'fp8' if fp8 else 'bf16'}"
            sync = self._make_sync(case, fp8, settings)
            self.bytes[case] = sum(transfer.nbytes for transfer in sync.plan.transfers)
            self.calls[case] = sync.run
            if fp8:
                self.calls[f"{case} unproved"] = partial(sync.run, hashing=False)
                self.calls[f"{case} until it samples"] = partial(time_until_it_samples, sync)
                streamed = self._make_sync(f"{case} streamed", fp8, settings.model_copy(update={"proof": "streamed"}))
                self.calls[f"{case} hashed while it is sent"] = streamed.run

    def run_all(self) -> None:
        """Time every case `repeat` times, after a warm-up turn that connects and touches all memory."""
        for turn in range(self.setup.repeat + 1):
            for case, call in self.calls.items():
                self._time(case, turn, call)
        for sync in self.syncs:
            sync.close()

    def _time(self, case: str, turn: int, call: Callable[[int], object]) -> None:
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
    """Return the seconds from the start of a sync until the engine samples with the new weights, before they are proved."""
    start, sampling_at = time.perf_counter(), list[float]()
    sync.run(turn, meanwhile=lambda: sampling_at.append(time.perf_counter()))
    return sampling_at[0] - start


def run_trainer_rank(setup: BenchSetup, pipes: Sequence[Connection], rank: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Run all cases; return {case: [seconds]} and {case: bytes}. Rank 0 holds the pipes to the engine."""
    with torch.device(setup.device):
        cases = BenchCases(setup, rank, pipes)
    cases.run_all()
    return cases.seconds, cases.bytes


def measure(setup: BenchSetup) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Run trainer and engine ranks and return the result of trainer rank 0."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(setup.rollout_tp)]
    engines = [spawn.Process(target=serve_engine_rank, args=(end, setup, rank)) for rank, (_, end) in enumerate(pipes)]
    for engine, (_, end) in zip(engines, pipes, strict=True):
        engine.start()
        end.close()
    backend = "gloo" if setup.device == "cpu" else "cpu:gloo,cuda:nccl"
    work = partial(run_trainer_rank, setup, [trainer_end for trainer_end, _ in pipes])
    try:
        return run_on_ranks(work, setup.train.world_size, backend, start_method="spawn")
    finally:
        for engine in engines:
            engine.kill()
            engine.join()


def summarize(setup: BenchSetup, seconds: Mapping[str, Sequence[float]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return medians by case, and ratios by sync setting."""
    median = {case: statistics.median(values) for case, values in seconds.items()}
    ratios = {}
    for name in setup.sync_configs():
        proved, unproved = median[f"{name} fp8"], median[f"{name} fp8 unproved"]
        compared = {
            "of plain copy in one process": ("plain copy", unproved),
            "of plain copy in one process, proof included": ("plain copy", proved),
            "fp8 against bf16": (f"{name} bf16", proved),
        }
        ratios[name] = {ratio: median[case] / of_sync for ratio, (case, of_sync) in compared.items() if case in median}
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
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "0.5gb",
    train: Annotated[str, typer.Option(help="Trainer layout: tp, pp, dp.")] = "tp=2",
    rollout: Annotated[str, typer.Option(help="Engine layout: tp.")] = "tp=1",
    repeat: Annotated[int, typer.Option(help="Measured turns.")] = 5,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of the weights.")] = "cpu",
    transports: Annotated[str, typer.Option(help="Values of sync.transport.")] = ",".join(ON_CPU),
    bucket_mb: Annotated[str, typer.Option(help="Values of sync.bucket_mb.")] = str(SyncConfig().bucket_mb),
    json_file: JsonFile = None,
) -> None:
    """Measure the weight sync and print medians and ratios."""
    with as_user_error(), tempfile.TemporaryDirectory() as folder:
        geometry = MODELS[parse_names("--model", model, MODELS)[0]]
        layout = Layout(**parse_sizes("--train", train, ["tp", "pp", "dp"]))
        tp = parse_sizes("--rollout", rollout, ["tp"])["tp"]
        setup = BenchSetup(geometry, layout, tp, repeat, Path(folder), device, transports.split(","), parse_numbers(bucket_mb))
        setup.make_plan(True, SyncConfig())  # refuses bad layouts before any process starts
        report = summarize(setup, *measure(setup))
    console = Console()
    console.print(f"model {model}, trainer {train}, engine {rollout}, {os.cpu_count()} cores, {repeat} turns")
    show(console, report)
    write_json(json_file, {"model": model, "train": train, "rollout": rollout, "cores": os.cpu_count(), **report})


if __name__ == "__main__":
    run_script(main)
