"""A real Megatron model in any layout, for every architecture, and a real engine below it in any layout; run as the ranks of a `World`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import is_rank0, run_on_rank0
from megatron_rl.mcore.layers.fp8_linear import quantize_model
from megatron_rl.mcore.load_weights import load_checkpoint
from megatron_rl.sync.engine_check import check_live_engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import Generation, SamplingParams
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from rollout_sglang.engine import SGLangEngine, start_engine_and_wait
from support.models import write_model
from support.trainer import Trainer
from support.trainer import start as start_trainer

_SMALL = {"max_running_requests": 16, "max_total_tokens": 4096, "request_timeout": 60.0, "start_timeout": 240.0}


@dataclasses.dataclass
class TrainerAndEngine:
    """This rank's part of the trainer; only rank 0 has the engine."""

    kind: str
    folder: Path
    trainer: Trainer
    config: Config
    engine: SGLangEngine | None

    @property
    def plan(self) -> SyncPlan:
        return SyncPlan.from_config(ModelGeometry.from_hf_config(self.trainer.hf_config), self.trainer.layout, self.config)


_now: list[TrainerAndEngine] = []


def start(kind: str, folder: Path, precision: dict[str, Any], layout: Layout, tp: int, ep: int) -> int:
    """Brings up the trainer, with weights of seed 0, and an engine that loaded them. Returns the server's pid."""
    start_trainer(layout)
    model = _written(kind, folder / "model", precision, layout, seed=0)
    rollout = {**_SMALL, "tp": tp, "ep": ep}
    config = Config.model_validate({"model": {"path": model}, "precision": precision, "rollout": rollout})
    trainer = Trainer(model, precision, layout=layout)
    _now[:] = [TrainerAndEngine(kind, folder, trainer, config, None)]

    def start_engine() -> int:
        engine = _now[0].engine = start_engine_and_wait(config, model, folder)
        return engine.process.pid

    return run_on_rank0(start_engine)


def _written(kind: str, folder: Path, precision: dict[str, Any], layout: Layout, seed: int) -> Path:
    """A checkpoint with random weights, written by rank 0; as many layers as virtual stages need."""
    if is_rank0():
        write_model(folder, kind, precision, seed, **({"num_hidden_layers": layout.pp * layout.vpp} if layout.vpp > 1 else {}))
    dist.barrier()
    return folder


def check_live() -> None:
    """The checks of `check_live_engine`, on rank 0."""
    if _now[0].engine:
        check_live_engine(_now[0].plan, _now[0].engine)


def change(seed: int) -> None:
    """Other weights in the trainer; the engine is not told."""
    now = _now[0]
    trainer = now.trainer
    folder = _written(now.kind, now.folder / f"model{seed}", trainer.precision.model_dump(), trainer.layout, seed)
    load_checkpoint(trainer.model, folder, trainer.shards)
    quantize_model(trainer.model)


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
    now = _now[0]
    return WeightSync(now.plan, now.engine, now.trainer.collect_named_tensors, SyncConfig.model_validate({"bucket_mb": 1, **settings}))


def generate(prompts: list[list[int]], tokens: int = 24) -> dict[str, Any]:
    """Samples answers: policy versions, prompt + answer of each, and the engine's and the trainer's log-probs of all sampled tokens one
    after the other."""
    now = _now[0]

    def sample() -> list[Generation]:
        assert now.engine is not None
        return now.engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=tokens))

    answers = run_on_rank0(sample)
    sequences = [TrainingSample(prompt, answer.output_ids_T) for prompt, answer in zip(prompts, answers, strict=True)]
    return {
        "versions": {answer.policy_version for answer in answers},
        "sequences": [(sequence.prompt_ids, sequence.response_ids) for sequence in sequences],
        "engine": torch.tensor([value for answer in answers for value in answer.logprobs_T]),
        "trainer": torch.cat(now.trainer.actor.compute_logprobs(sequences)[0]),
    }
