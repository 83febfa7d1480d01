"""The engine's side of a rehearsal: the model that the engine builds on a Hopper GPU, compared with the tensors that a sync sends.

The engine runs in a process of its own, with tensors that have a shape and no memory.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from megatron_rl.config import Config
from megatron_rl.cost.hardware import LINK_EFFICIENCY, Gpu
from megatron_rl.errors import RunError
from megatron_rl.hf.files import read_config
from megatron_rl.planner.memory_by_phase import engine_workspace
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.engine import EngineTensorSpec, find_engine_launcher
from megatron_rl.sync.checks import check_activation_formats, check_rank_tensors
from parallel.sglang_shards import build_engine_shards

TOLERANCE = 0.05
"""Largest relative difference between planned and rehearsed memory."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TIMEOUT_S = 7200  # 512 GPUs on two busy cores take half an hour


@dataclass(frozen=True)
class EngineRankReport:
    """One rank of an engine."""

    rank: int
    model: str
    """The engine's model class."""
    tensors: int
    """Number of tensors that a sync fills. `bytes` is their size."""
    bytes: int
    chunks: int
    """Number of chunks of a sync that were unpacked into these tensors."""
    planned: int
    """Planned bytes of the tensors."""
    fault: str
    """The first error that a run on GPUs would raise once its engines are up, or ""."""
    forward: dict[str, Any] | None = None
    """What the forward passes did (`rollout_sglang.rehearsal.forward.ForwardRehearsal`) with roofline seconds, or None if none ran."""
    workspace: int = 0
    """Bytes that the plan leaves for passes and CUDA graphs."""

    @property
    def needed(self) -> int:
        """Bytes of the captured graphs and of the pass with the largest activations."""
        if self.forward is None:
            return 0
        return self.forward["graph_bytes"] + max((phase["activation_bytes"] for phase in self.forward["phases"]), default=0)

    @property
    def passes(self) -> bool:
        return not self.fault and abs(self.planned / self.bytes - 1) <= TOLERANCE and self.needed <= self.workspace


def rehearse_engine(config: Config, planned: int, gpu: Gpu) -> list[EngineRankReport]:
    """Rehearse the first and last rank of an engine. Raise RunError with the end of the engine's output if it cannot build the model.

    Args:
        planned: planned bytes of a rank's weights.
    """
    contract, ranks = PrecisionContract.from_config(config.precision), sorted({0, config.rollout.tp - 1})
    command = [*find_engine_launcher(config.rollout.engine).rehearsal_command(), ",".join(map(str, ranks))]
    job = json.dumps({"config": config.model_dump(mode="json"), "gpu": asdict(gpu)})
    done = subprocess.run(command, input=job, capture_output=True, encoding="utf-8", timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        last_line = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        raise RunError(f"the engine cannot build the model: {last_line}", done.stderr[-4000:])
    geometry = replace(config.make_geometry(read_config(config.model.folder)), kv_scales=contract.scales_kv_by_layer)
    shards, reports = build_engine_shards(geometry, config.rollout.tp, config.rollout.ep), []
    for rank, answer in json.loads(done.stdout).items():
        live = {name: EngineTensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in answer["tensors"].items()}
        fault = ""
        try:
            check_rank_tensors(int(rank), shards[int(rank)], contract, live)
            _check_answer(answer, contract)
        except RunError as error:
            fault = str(error)
        for phase in answer["forward"]["phases"] if answer["forward"] else ():
            phase["seconds"] = _estimate_seconds(phase, gpu)
        nbytes = sum(prod(spec.shape) * _ITEM_BYTES.get(spec.dtype, 1) for spec in live.values())
        found = int(rank), answer["model"], len(live), nbytes, answer["chunks"], planned, fault
        reports.append(EngineRankReport(*found, answer["forward"], engine_workspace(config.rollout.tp)))
    return reports


def _check_answer(answer: Mapping[str, Any], contract: PrecisionContract) -> None:
    """Raise RunError for the first problem that the engine's process found."""
    if contract.engine_format.quantized:
        check_activation_formats(contract, answer["activation_formats"])
    if answer["unknown"]:
        raise RunError(f"{answer['unknown'][0]} is neither filled by a sync nor known to rollout_sglang/derived_tensors.py")
    for fault in (answer["sync_fault"], answer["forward"] and answer["forward"]["fault"]):
        if fault:
            raise RunError(fault)


def _estimate_seconds(phase: Mapping[str, Any], gpu: Gpu) -> dict[str, float]:
    """Return roofline seconds of a pass's matrix products, of the bytes that kernels read and write, and of its exchange."""
    exchange = phase["sent_bytes"] / (gpu.nvlink * LINK_EFFICIENCY)
    return {"products": gpu.product_seconds(phase["flops"]), "memory": gpu.memory_seconds(phase["bytes"]), "exchange": exchange}
