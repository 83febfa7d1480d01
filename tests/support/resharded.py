"""A trainer that holds random weights laid out as Megatron lays them, without Megatron, and a real engine below it; run as the ranks of
a `World`. It is what `support.served` is, for every architecture, layout and engine, but it cannot train: its weights come from a seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config import Config, Sync
from megatron_rl.fp8.quantize import quantize_weight
from megatron_rl.precision import PrecisionContract
from megatron_rl.ranks import on_rank0
from megatron_rl.sync import WeightSync
from megatron_rl.sync_plan import SyncPlan, check_live_engine
from megatron_rl.types import Sampling
from parallel.geometry import ModelGeometry, Rect, Shard
from parallel.layout import Layout
from parallel.megatron import trainer_shards
from parallel.plan import kind_of, scale_name
from parallel.regions import region
from rollout_sglang.engine import SGLangEngine, launch
from support.architectures import masters, write_model
from support.processes import free_port

_SMALL = {"max_running_requests": 16, "max_total_tokens": 4096, "request_timeout": 60.0, "start_timeout": 180.0}


@dataclasses.dataclass
class Held:
    """This rank's part of the trainer; only rank 0 has the engine."""

    hf_config: dict[str, Any]
    layout: Layout
    config: Config
    engine: SGLangEngine | None = None
    seed: int = 0

    @property
    def model(self) -> ModelGeometry:
        return ModelGeometry.from_hf_config(self.hf_config)

    @property
    def plan(self) -> SyncPlan:
        return SyncPlan.of_config(self.model, self.layout, self.config)

    def planes(self) -> dict[str, torch.Tensor]:
        """This rank's tensors as an optimizer step would leave them."""
        contract = PrecisionContract.of(self.config.precision)
        shards = trainer_shards(self.model, self.layout, quantised=contract.rollout_fp8)[dist.get_rank()]
        return planes_of(shards, masters(self.hf_config, self.seed), contract)


def planes_of(shards: list[Shard], tensors: dict[str, torch.Tensor], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """Each shard put together from its pieces; FP8 roles quantised on the shard's own blocks, as the trainer does."""
    found: dict[str, torch.Tensor] = {}
    high = {"bf16": torch.bfloat16, "fp32": torch.float32}[contract.high]
    for shard in shards:
        kind = kind_of(shard.role, contract.fp8_roles())
        value = torch.zeros(shard.shape)
        for tensor, source, row, col in shard.pieces:
            region(value, Rect(row, col, source.rows, source.cols)).copy_(region(tensors[tensor.name], source))
        if kind == "fp8":
            found[shard.name], found[scale_name(shard.name)] = quantize_weight(value, contract.scale_format)
        else:
            found[shard.name] = value.to(torch.float32 if kind == "fp32" else high)
    return found


_now: list[Held] = []


def start(kind: str, folder: Path, precision: dict[str, Any], layout: Layout, tp: int, ep: int, **changes: Any) -> int:
    """Brings up the trainer, with weights of seed 0, and an engine that loaded them. Returns the server's pid."""
    if not dist.is_initialized():
        alone = {"rank": 0, "world_size": 1, "init_method": f"tcp://127.0.0.1:{free_port()}"}
        dist.init_process_group("gloo", **(alone if layout.world_size == 1 else {}))
    hf_config = on_rank0(lambda: write_model(folder / "model", kind, precision, **changes))
    rollout = {**_SMALL, "tp": tp, "ep": ep}
    config = Config.model_validate({"model": {"path": folder / "model"}, "precision": precision, "rollout": rollout})
    held = Held(hf_config, layout, config)

    def launch_engine() -> int:
        held.engine = launch(config, folder / "model", folder)
        return held.engine.process.pid

    _now[:] = [held]
    return on_rank0(launch_engine)


def check_live() -> None:
    """The checks of `check_live_engine`, on rank 0."""
    if _now[0].engine:
        check_live_engine(_now[0].plan, _now[0].engine)


def change(seed: int) -> None:
    """Other weights in the trainer; the engine is not told."""
    _now[0].seed = seed


def sync(version: int, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """One whole sync, with `settings` of the configuration's section: its report."""
    weight_sync = _sync(settings or {})
    try:
        return dataclasses.asdict(weight_sync.run(version))
    finally:
        weight_sync.close()


def prove() -> int:
    """The proof alone: number of engine tensors proved."""
    weight_sync = _sync({})
    try:
        return weight_sync.prove()
    finally:
        weight_sync.close()


def _sync(settings: dict[str, Any]) -> WeightSync:
    held = _now[0]
    return WeightSync(held.plan, held.engine, held.planes, Sync.model_validate({"bucket_mb": 1, **settings}))


def generate(prompts: list[list[int]], tokens: int = 24) -> dict[str, Any] | None:
    """Samples answers, on rank 0: policy versions, prompt + answer of each, and the log-probs of all sampled tokens one after the other."""
    if not _now[0].engine:
        return None
    answers = _now[0].engine.generate(prompts, Sampling(temperature=1.0, max_new_tokens=tokens))
    return {
        "versions": {answer.policy_version for answer in answers},
        "sequences": [(prompt, answer.output_ids_T) for prompt, answer in zip(prompts, answers, strict=True)],
        "logprobs": torch.tensor([value for answer in answers for value in answer.logprobs_T]),
    }
