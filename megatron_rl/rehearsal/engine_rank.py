"""The engine's side of a rehearsal: what SGLang would make of the model on a Hopper GPU, against what a sync would send.

SGLang runs in a process of its own (`rollout_sglang.rehearsal.rank`), with tensors that have a shape and no memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import RunError
from megatron_rl.hf.files import read_config
from megatron_rl.cost.hardware import LINK_EFFICIENCY, Gpu
from megatron_rl.planner.memory_by_phase import engine_workspace
from megatron_rl.planner.roofline import COMPUTE_EFFICIENCY
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.engine import EngineTensorSpec
from megatron_rl.sync.checks import check_activation_formats, check_rank_tensors
from parallel.sglang_shards import build_engine_shards

TOLERANCE = 0.05
"""Share by which the plan's memory may differ from the rehearsal's."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SECONDS = 600


@dataclass(frozen=True)
class EngineRankReport:
    """One rank of an engine."""

    rank: int
    model: str
    """SGLang's class."""
    tensors: int
    """That a sync would fill."""
    bytes: int
    """Of those."""
    chunks: int
    """Of a sync, unpacked into those."""
    planned: int
    """Bytes that the plan says."""
    fault: str
    """The first thing that a run on GPUs would refuse when its engines are up; "" for none."""
    forward: dict[str, Any] | None = None
    """What its passes did: `rollout_sglang.rehearsal.forward.ForwardRehearsal`, with seconds of roofline. None for ranks that ran none."""
    workspace: int = 0
    """Bytes that the plan leaves for passes and CUDA graphs."""

    @property
    def needed(self) -> int:
        """Bytes of the captured graphs, and of the pass that takes the most."""
        if self.forward is None:
            return 0
        return self.forward["graph_bytes"] + max((phase["activation_bytes"] for phase in self.forward["phases"]), default=0)

    @property
    def passes(self) -> bool:
        return not self.fault and abs(self.planned / self.bytes - 1) <= TOLERANCE and self.needed <= self.workspace


def rehearse_engine(config: Config, planned: int, gpu: Gpu) -> list[EngineRankReport]:
    """Rehearse the first and the last rank of an engine, whose weights take `planned` bytes by the plan. Raise RunError, with SGLang's last
    words, if it cannot build the model."""
    contract, ranks = PrecisionContract.from_config(config.precision), sorted({0, config.rollout.tp - 1})
    command = [sys.executable, "-m", "rollout_sglang.rehearsal.rank", ",".join(map(str, ranks))]
    job = json.dumps({"config": config.model_dump(mode="json"), "gpu": asdict(gpu)})
    done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise RunError(f"SGLang does not build the engine's model: {_last_line(done.stderr)}", done.stderr[-4000:])
    geometry = replace(config.make_geometry(read_config(config.model.folder)), kv_scales=contract.scales_kv_by_layer)
    shards, reports = build_engine_shards(geometry, config.rollout.tp, config.rollout.ep), []
    for rank, answer in json.loads(done.stdout).items():
        live = {name: EngineTensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in answer["tensors"].items()}
        fault = ""
        try:
            check_rank_tensors(int(rank), shards[int(rank)], contract, live)
            if contract.engine_format.quantized:
                check_activation_formats(contract, answer["activation_formats"])
            _check_unknown(answer["unknown"])
            if answer["sync_fault"]:
                raise RunError(answer["sync_fault"])
            if answer["forward"] and answer["forward"]["fault"]:
                raise RunError(answer["forward"]["fault"])
        except RunError as error:
            fault = str(error)
        for phase in answer["forward"]["phases"] if answer["forward"] else ():
            phase["seconds"] = estimate_seconds(phase, gpu)
        found = int(rank), answer["model"], len(live), _count_bytes(live), answer["chunks"], planned, fault
        reports.append(EngineRankReport(*found, answer["forward"], engine_workspace(config.rollout.tp)))
    return reports


def estimate_seconds(phase: Mapping[str, Any], gpu: Gpu) -> dict[str, float]:
    """Return the seconds of roofline of a pass: of its products, of bytes that kernels read and write, and of bytes that it exchanges."""
    rates = {"fp8": gpu.fp8, "int8": gpu.fp8, "bf16": gpu.bf16, "fp32": gpu.bf16 / 2}
    products = sum(count / (rates[kind] * COMPUTE_EFFICIENCY) for kind, count in phase["flops"].items() if kind in rates)
    memory = phase["bytes"] / (gpu.hbm * LINK_EFFICIENCY)
    return {"products": products, "memory": memory, "exchange": phase["sent_bytes"] / (gpu.nvlink * LINK_EFFICIENCY)}


def _check_unknown(unknown: Sequence[str]) -> None:
    if unknown:
        raise RunError(f"{unknown[0]} is neither filled by a sync nor known to rollout_sglang/derived_tensors.py")


def _count_bytes(live: Mapping[str, EngineTensorSpec]) -> int:
    return sum(prod(spec.shape) * _ITEM_BYTES.get(spec.dtype, 1) for spec in live.values())


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
