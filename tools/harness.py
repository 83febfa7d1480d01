"""Shared code of the tools: worlds of trainer ranks, engine ranks without SGLang, random checkpoints, options, and JSON reports."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

from megatron_rl.config.reading import parse_number
from megatron_rl.config.sync import Running
from megatron_rl.errors import MegatronRLError, RunError, UserError
from megatron_rl.hf.stacks import join_parts
from megatron_rl.hf.write import FILE_BYTES, cut_into_files, name_file, write_all_but_weights, write_file, write_index
from parallel.model_geometry import ModelGeometry
from parallel.shards import HFTensor, Shard
from parallel.transport.process_group import listening_store
from rollout_sglang.rank_handler import RankHandler, RankRequests

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")]

_IDLE_SECONDS = 600
"""Seconds for which the ranks of a world may use no CPU time. Time in which this process is stopped does not count."""
_NO_TIMEOUT = timedelta(days=30)
"""Timeout of collectives in a world: `run_on_ranks` ends a world that hangs."""


def run_on_ranks(work: Callable[[int], Any], world_size: int, backend: str = "gloo", start_method: str = "forkserver") -> Any:
    """Run `work(rank)` in one process per trainer rank and return the result of rank 0.

    Raise the MegatronRLError that rank 0 raises, or RunError if a rank dies or all ranks hang.
    """
    store = listening_store("127.0.0.1", _NO_TIMEOUT.total_seconds())
    results = mp.get_context(start_method).SimpleQueue()
    arguments = (work, world_size, store.port, backend, results)
    ranks = mp.start_processes(_run_rank, args=arguments, nprocs=world_size, join=False, start_method=start_method)
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
            raise RunError(f"no result: the trainer ranks have used no CPU time for {_IDLE_SECONDS} s")
    result = results.get()
    ranks.join()
    if isinstance(result, MegatronRLError):
        raise result
    return result


def _run_rank(rank: int, work: Callable[[int], Any], world_size: int, port: int, backend: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, timeout=_NO_TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_NO_TIMEOUT)
    try:
        result = work(rank)
    except MegatronRLError as error:
        result = error
    finally:
        dist.destroy_process_group()
    if rank == 0:
        results.put(result)


def _read_cpu_seconds(pid: int) -> float:
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:  # the rank has ended
        return 0.0


class EngineStub(RankRequests):
    """An engine for `WeightSync` that samples nothing; a subclass passes requests to the code that runs in SGLang's scheduler."""

    def pause(self, running: Running) -> None: ...
    def admit(self) -> None: ...
    def resume(self) -> None: ...
    def begin_sync(self) -> None: ...
    def end_sync(self, version: int) -> None: ...


class EngineRankStub:
    """An engine rank without SGLang: `RankHandler` receives into the tensors of `shards`."""

    def __init__(self, shards: Iterable[Shard], tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors, self._handler = tensors, RankHandler()
        vocabularies = [_make_vocabulary(shard) for shard in shards if shard.role in ("embedding", "lm_head")]
        model = SimpleNamespace(  # a torch module accepts no names with dots; no layer has a derived tensor
            named_parameters=tensors.items, named_modules=lambda: vocabularies, modules=list
        )
        cache = SimpleNamespace(size=0, available_size=int)
        self._runner: Any = SimpleNamespace(model=model, token_to_kv_pool_allocator=cache, req_to_token_pool=None)

    def answer(self, request: dict[str, Any], rank: int) -> dict[str, str]:
        return self._handler.answer(request, rank, self._runner)


def _make_vocabulary(shard: Shard) -> tuple[str, Any]:
    """Return the name of an embedding and what SGLang's layer says about its padding."""
    rows = sum(region.tensor_rect.rows for region in shard.regions)
    indices = SimpleNamespace(num_org_elements=rows, num_org_elements_padded=shard.rows)
    return shard.name.removesuffix(".weight"), SimpleNamespace(shard_indices=indices)


def write_random_checkpoint(folder: Path, hf_config: dict[str, Any], std: float = 0.05, file_bytes: int = FILE_BYTES) -> None:
    """Write a checkpoint of random BF16 weights, with one file of it in memory. Every vector is random, too: norms scale by about one;
    biases and sinks are near zero."""
    model, generator = ModelGeometry.from_hf_config(hf_config), torch.Generator().manual_seed(0)
    tensors = model.tensors() | model.list_kept()

    def make(tensor: HFTensor) -> torch.Tensor:
        middle, spread = (1.0, 0.2) if tensor.role == "norm" else (0.0, 0.2 if tensor.vector else std)
        return torch.empty(tensor.shape).normal_(middle, spread, generator=generator).bfloat16()

    write_all_but_weights(folder, hf_config, None)
    files = cut_into_files({name: 2 * prod(tensor.shape) for name, tensor in tensors.items()}, file_bytes)
    parts = (join_parts({name: make(tensors[name]) for name in names}) for names in files)
    write_index(folder, [write_file(folder / name_file(number, len(files)), part) for number, part in enumerate(parts)])


def parse_names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated option. Raise UserError if a name is unknown."""
    names, known = text.split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        raise UserError(option, ",".join(unknown), f"must be some of {', '.join(known)}", "correct it")
    return names


def parse_sizes(option: str, text: str, allowed: Sequence[str]) -> dict[str, int]:
    """Parse parallel sizes such as `tp=2,pp=2`. Raise UserError unless names are allowed and sizes are positive integers."""
    sizes = {name: size for name, _, size in (part.partition("=") for part in text.split(","))}
    if not all(name in allowed and parse_number(size, 1, 1 << 16) for name, size in sizes.items()):
        raise UserError(option, text, f"must be like tp=2; the names are {', '.join(allowed)}", "correct it")
    return {name: int(size) for name, size in sizes.items()}


def parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def write_json(file: Path | None, report: object) -> None:
    if file:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
