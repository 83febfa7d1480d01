"""Check the weight sync for one model and one pair of layouts, byte by byte, on this machine's CPUs.

    python tools/checks/verify_sync.py --hf-config FILE_OR_DIR --train tp=4,pp=2 --rollout tp=2 [--layers N] [--seed N]
        [--scale-format pow2|fp32] [--dump DIR] [--json FILE]

Trainer ranks are gloo processes. Each builds its part of the real Megatron model, fills it with random weights, quantizes it as the
trainer does, and sends it with `WeightSync`. The engine ranks are tensors of SGLang's names and shapes that the engine's own
`RankHandler` fills. Every byte is then compared with quantizing the Hugging Face tensors directly on their grid. Exit code 0 only
where every byte agrees; 1 where one differs; 2 for bad input.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from safetensors.torch import save_file

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import Running, SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import MegatronRLError, RunError, UserError
from megatron_rl.mcore.layers.linear.quantized_linear import list_quantized_layers
from megatron_rl.mcore.model import build_model, start_megatron
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, global_parameters
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import quantize
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.digest import make_stored_tensors, raw_bytes, view_rect
from parallel.layout import EngineLayout, Layout, parse_sizes
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect
from parallel.shards import GeometryError, HFTensor, Rect, Region, Shard
from parallel.transport.process_group import listening_store
from rollout_sglang.rank_handler import RankHandler
from rollout_sglang.rank_requests import RankRequests

_IDLE_SECONDS = 600
"""For which ranks may wait without computing anything, in seconds of this process: a pause of all of them does not count."""
_FOREVER = timedelta(days=30)
"""The limit of a rank's waits for the others; `run_on_ranks` has one."""
_NOT_ABOUT_WEIGHTS = {"rope_theta": 10_000.0, "rope_parameters": None, "rope_scaling": None, "use_sliding_window": False}
"""Settings of a config.json that no weight depends on, of kinds that the trainer computes."""


@dataclass(frozen=True)
class VerifyTask:
    """What is verified; every process gets it."""

    hf_config: dict[str, Any]
    train: Layout
    rollout: EngineLayout
    """tp and ep of the engine."""
    contract: PrecisionContract
    seed: int
    dump: Path | None

    @property
    def model(self) -> ModelGeometry:
        return ModelGeometry.from_hf_config(self.hf_config)


def make_hf_tensor(task: VerifyTask, tensor: HFTensor) -> torch.Tensor:
    """Return the random checkpoint tensor of a name, the same in every process: BF16 where it stays high, FP32 masters where FP8."""
    generator = torch.Generator().manual_seed(task.seed * 0x1_0000_0000 + zlib.crc32(tensor.name.encode()))
    shape = (tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols)
    format = task.contract.format_of(tensor.role)
    return torch.randn(shape, generator=generator).to(torch.float32 if format.quantized else getattr(torch, format.dtype))


def build_trainer_tensors(task: VerifyTask, rank: int) -> dict[str, torch.Tensor]:
    """Return one rank's tensors, from a real Megatron model. No master is kept once it is quantized, so that big models fit."""
    start_megatron(task.train, task.seed)
    model = build_model(task.hf_config, task.train, task.contract)
    shards, parameters = build_rank_shards(task.hf_config, task.train, rank), global_parameters(model)
    layers = {id(layer.weight): layer for layer in list_quantized_layers(model)}
    for shard in shards:
        layer = layers.get(id(parameters[shard.name]))
        values = parameters[shard.name].detach() if layer is None else torch.zeros(shard.shape)
        for region in shard.regions:
            view_rect(values, region.shard_rect).copy_(view_rect(make_hf_tensor(task, region.tensor), region.tensor_rect))
        if layer is not None:
            layer.quantize(values)
    return collect_named_tensors(model, shards, task.contract)


def make_model(tensors: Mapping[str, torch.Tensor]) -> SimpleNamespace:
    """Return what an engine's rank finds its tensors in; a torch module takes no names with dots."""
    return SimpleNamespace(named_parameters=tensors.items, tensors=tensors)


class InProcessEngine(RankRequests):
    """The engine that `WeightSync` talks to: tensors of every engine rank in this process, filled by the engine's own code."""

    def __init__(self, shards: Mapping[int, Sequence[Shard]], contract: PrecisionContract) -> None:
        self.tensors = {rank: make_stored_tensors(rank_shards, contract.format_of) for rank, rank_shards in shards.items()}
        cache = SimpleNamespace(size=0, available_size=int)
        models = [make_model(tensors) for tensors in self.tensors.values()]
        self._ranks = [(RankHandler(), SimpleNamespace(model=model, token_to_kv_pool_allocator=cache)) for model in models]

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        return [handler.answer(request, rank, runner) for rank, (handler, runner) in enumerate(self._ranks)]

    def pause(self, running: Running) -> None: ...
    def admit(self) -> None: ...
    def resume(self) -> None: ...
    def begin_sync(self) -> None: ...
    def end_sync(self, version: int) -> None: ...


def find_differences(task: VerifyTask, engine: InProcessEngine, shards: Mapping[int, Sequence[Shard]]) -> Iterator[str]:
    """Name the engine rectangles that are not the checkpoint's; the checkpoint's tensors are quantized whole, on their own grid."""
    copies: dict[str, list[tuple[int, Shard, Region]]] = {}
    for rank, rank_shards in shards.items():
        for shard in rank_shards:
            for region in shard.regions:
                copies.setdefault(region.tensor.name, []).append((rank, shard, region))
    for of_tensor in copies.values():
        tensor = of_tensor[0][2].tensor
        format, value = task.contract.format_of(tensor.role), make_hf_tensor(task, tensor)
        quantized = quantize(value, format) if format.quantized else None
        for rank, shard, region in of_tensor:
            tensors, rect, source_rect = engine.tensors[rank], region.shard_rect, region.tensor_rect
            same = {"values": _same(tensors[shard.name], rect, quantized.data if quantized else value, source_rect)}
            if quantized:
                scales, scale_rect = tensors[format.scale_name(shard.name)], get_scale_rect(rect, format)
                same["scales"] = _same(scales, scale_rect, quantized.scale, get_scale_rect(source_rect, format))
            for what in [what for what, equal in same.items() if not equal]:
                wrong = scale_rect if what == "scales" else rect
                yield f"engine rank {rank}: {what} of {shard.name}, rows {wrong.row}..{wrong.row + wrong.rows - 1}, from {tensor.name}"


def _same(values: torch.Tensor, rect: Rect, expected: torch.Tensor, expected_rect: Rect) -> bool:
    actual_bytes, expected_bytes = (raw_bytes(view_rect(tensor, within)) for tensor, within in ((values, rect), (expected, expected_rect)))
    return values.dtype == expected.dtype and np.array_equal(actual_bytes, expected_bytes)


def run_rank(rank: int, work: Callable[[int], Any], world_size: int, port: int, results: Any) -> None:
    """Run `work` on one trainer rank; rank 0 puts what it returns (or an expected error) into `results`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, timeout=_FOREVER)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_FOREVER)
    try:
        result = work(rank)
    except MegatronRLError as error:
        result = error
    finally:
        dist.destroy_process_group()
    if rank == 0:
        results.put(result)


def sync_and_compare(task: VerifyTask, rank: int) -> Any:
    """Sync a model of random weights; rank 0 holds the engine, compares, and returns the report."""
    settings = SyncConfig(bucket_mb=64)
    plan = SyncPlan.make(task.model, task.train, task.rollout, task.contract, settings.chunk_bytes)
    named_tensors = build_trainer_tensors(task, rank)
    engine: Rank0[Any] = Rank0(lambda: InProcessEngine(plan.targets, task.contract))
    sync = WeightSync(plan, engine, lambda: named_tensors, settings)
    try:
        start = time.perf_counter()
        report = sync.run(1)
        seconds = time.perf_counter() - start
    finally:
        sync.close()
    if rank != 0:
        return None
    across_ranks = sum(transfer.nbytes for transfer in plan.transfers if transfer.source_rank != transfer.target_rank)
    differences = list(find_differences(task, engine.value, plan.targets))
    if task.dump:
        write_dump(task, engine.value, task.dump)
    return {
        "parameters": report.tensors,
        "derived": report.derived,
        "blocks": report.blocks,
        "bytes_moved": report.bytes,
        "bytes_across_ranks": across_ranks,
        "seconds": seconds,
        "proof_seconds": report.proof_seconds,
        "served_seconds": report.served_seconds,
        "differences": differences,
    }


def write_dump(task: VerifyTask, engine: InProcessEngine, folder: Path) -> None:
    """Write the checkpoint's tensors and those of every engine rank as safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    source = {name: make_hf_tensor(task, tensor) for name, tensor in task.model.tensors().items()}
    save_file(source, folder / "hf.safetensors", metadata={"format": "pt"})
    for rank, tensors in engine.tensors.items():
        save_file(tensors, folder / f"rollout_rank{rank}.safetensors", metadata={"format": "pt"})


def read_hf_config(path: Path, layers: int | None) -> dict[str, Any]:
    """Read a config.json and cut the model to `layers`. Raise UserError for bad input."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError("--hf-config", str(path), f"cannot be read ({type(error).__name__})", "name a config.json or its folder") from None
    if not isinstance(config, dict):
        raise UserError("--hf-config", str(path), "must be a JSON object", "name a config.json or its folder")
    if layers is not None:
        config["num_hidden_layers"] = min(layers, config.get("num_hidden_layers", layers))
    config.setdefault("max_position_embeddings", 4096)
    return config | _NOT_ABOUT_WEIGHTS


def run_on_ranks(work: Callable[[int], Any], world_size: int) -> Any:
    """Run `work(rank)` in trainer ranks and return rank 0's result. Raise its expected error, or RunError where a rank is lost or none
    computes any more."""
    store = listening_store("127.0.0.1", _FOREVER.total_seconds())
    method = "forkserver"  # it imports Megatron once for all ranks
    results = mp.get_context(method).SimpleQueue()
    ranks = mp.start_processes(run_rank, args=(work, world_size, store.port, results), nprocs=world_size, join=False, start_method=method)
    idle, used = 0, 0.0
    while results.empty():
        try:
            if ranks.join(timeout=1) and results.empty():
                raise RunError("the trainer ranks ended without a result")
        except mp.ProcessRaisedException as error:
            raise RunError(f"a trainer rank failed: {error}") from None
        now = sum(_read_cpu_seconds(process.pid) for process in ranks.processes)
        idle, used = (0, now) if abs(now - used) >= 1 else (idle + 1, used)
        if idle > _IDLE_SECONDS:
            for process in ranks.processes:
                process.terminate()
            raise RunError(f"no result, and the trainer ranks have computed nothing for {_IDLE_SECONDS} s")
    result = results.get()
    ranks.join()
    if isinstance(result, MegatronRLError):
        raise result
    return result


def _read_cpu_seconds(pid: int) -> float:
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:  # it has ended
        return 0.0


def main(
    hf_config: Annotated[Path, typer.Option(help="A config.json, or the folder that holds it.")],
    train: Annotated[str, typer.Option(help="tp, pp, vpp, ep, etp, dp, cp: for example tp=4,pp=2")] = "tp=1",
    rollout: Annotated[str, typer.Option(help="tp and ep of the engine: for example tp=2")] = "tp=1",
    layers: Annotated[int | None, typer.Option(help="Cut the model to this many layers.")] = None,
    seed: int = 0,
    scale_format: Literal["pow2", "fp32"] = "pow2",
    dump: Annotated[Path | None, typer.Option(help="Write hf.safetensors and rollout_rankR.safetensors here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """Check that every byte of every engine parameter is the checkpoint's, quantised on the checkpoint's own grid."""
    try:
        config = read_hf_config(hf_config, layers)
        layout = Layout(**parse_sizes("--train", train, ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")))
        contract = PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified", scale_format=scale_format))
        engine = EngineLayout(**parse_sizes("--rollout", rollout, ("tp", "ep")))
        task = VerifyTask(config, layout, engine, contract, seed, dump)
        SyncPlan.make(task.model, layout, task.rollout, contract, SyncConfig().chunk_bytes)  # refuses before a process starts
        report = run_on_ranks(partial(sync_and_compare, task), layout.world_size)
    except (MegatronRLError, GeometryError) as error:
        print(f"verify_sync: {error}", file=sys.stderr)
        raise typer.Exit(getattr(error, "exit_code", 2)) from None
    for name, value in report.items():
        print(f"{name:20s} {len(value) if isinstance(value, list) else value}")
    for line in report["differences"][:10]:
        print(f"  differs: {line}")
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    raise typer.Exit(1 if report["differences"] else 0)


if __name__ == "__main__":
    typer.run(main)
