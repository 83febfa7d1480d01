"""The trainer's process with a real SGLang engine below it, run as the one rank of a `World`: what `megatron_rl.training.session`
builds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import RunError
from megatron_rl.mcore.checkpoint import load as checkpoints
from megatron_rl.mcore.export import export_checkpoint, save_hf
from megatron_rl.sync.engine_check import check_live_engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.digest import view_rect
from parallel.model_geometry import ModelGeometry, Rect
from rollout_sglang.engine import SGLangEngine, start_engine_and_wait
from support.engines import engine_config
from support.trainer import Trainer


class Served:
    """A trainer, its engine, and syncs between them."""

    def __init__(self, checkpoint: Path, folder: Path, precision: dict[str, Any]) -> None:
        self.folder = folder
        self.trainer = Trainer(checkpoint, precision, {"learning_rate": 3e-3})
        self.config = engine_config(checkpoint, precision)
        self.engine: SGLangEngine

    def save(self, to: Path) -> Path:
        """What a run hands to its engine."""
        trainer = self.trainer
        save_hf(to, trainer.collect_named_tensors(), trainer.hf_config, trainer.layout, trainer.contract, trainer.folder)
        return to

    def plan(self, bucket_bytes: int) -> SyncPlan:
        geometry = ModelGeometry.from_hf_config(self.trainer.hf_config)
        return SyncPlan.make(geometry, self.trainer.layout, (1, 1), self.trainer.contract, bucket_bytes)

    def sync(self, bucket_bytes: int) -> WeightSync:
        return WeightSync(self.plan(bucket_bytes), self.engine, self.trainer.collect_named_tensors)


_now: list[Served] = []


def start(checkpoint: Path, folder: Path, precision: dict[str, Any], engine_model: Path | None = None) -> int:
    """Brings up trainer and engine, which loads `engine_model` where given, else the trainer's own blocks. Returns the server's pid."""
    served = Served(checkpoint, folder, precision)
    served.engine = start_engine_and_wait(served.config, engine_model or served.save(folder / "engine_model"), folder)
    _now[:] = [served]
    return served.engine.process.pid


def save_only(checkpoint: Path, to: Path, precision: dict[str, Any]) -> Path:
    """The folder that a run with this checkpoint hands to its engine."""
    return Served(checkpoint, to, precision).save(to)


def check_live() -> None:
    """The checks of `check_live_engine`."""
    check_live_engine(_now[0].plan(1 << 20), _now[0].engine)


def prove() -> int:
    """The proof alone: number of engine tensors proved."""
    sync = _now[0].sync(1 << 20)
    try:
        return sync.prove()
    finally:
        sync.close()


def train(batch: list[TrainingSample]) -> None:
    """One optimizer step."""
    _now[0].trainer.actor.update(batch, PolicyLoss(AlgorithmConfig()))


def sync(version: int, bucket_bytes: int) -> dict[str, Any]:
    """One whole sync in buckets of at most that many bytes: its report and the number of buckets."""
    weight_sync = _now[0].sync(bucket_bytes)
    try:
        return {**dataclasses.asdict(weight_sync.run(version)), "buckets": len(weight_sync.plan.buckets)}
    finally:
        weight_sync.close()


def generate(prompts: list[list[int]], tokens: int = 24) -> dict[str, Any]:
    """Samples answers: policy versions, engine's and trainer's log-probs of all sampled tokens, one after the other."""
    served = _now[0]
    answers = served.engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=tokens))
    sequences = [TrainingSample(prompt, answer.output_ids_T) for prompt, answer in zip(prompts, answers, strict=True)]
    return {
        "versions": {answer.policy_version for answer in answers},
        "engine": torch.tensor([value for answer in answers for value in answer.logprobs_T]),
        "trainer": torch.cat(served.trainer.actor.compute_logprobs(sequences)[0]),
    }


def change_trainer(name: str, row: int, col: int) -> None:
    """Flips the lowest bit of one element that the trainer holds, without the engine being told."""
    element = _now[0].trainer.collect_named_tensors()[name][row : row + 1, col : col + 1]
    element.view(torch.uint8)[0, 0] ^= 1


def change_engine(name: str, row: int, col: int) -> None:
    """Syncs the trainer's blocks with one bit of what fills that element of an engine parameter wrong."""
    served = _now[0]
    plan, named_tensors = served.plan(1 << 20), dict(served.trainer.collect_named_tensors())
    transfer = next(transfer for transfer in plan.transfers if transfer.target == name and _holds(transfer.target_rect, row, col))
    wrong = named_tensors[transfer.source] = named_tensors[transfer.source].clone()
    place = Rect(transfer.source_rect.row + row - transfer.target_rect.row, transfer.source_rect.col + col - transfer.target_rect.col, 1, 1)
    view_rect(wrong, place).view(torch.uint8).view(-1)[0] ^= 1
    sync = WeightSync(plan, served.engine, lambda: named_tensors)
    try:
        sync.run(0)
    finally:
        sync.close()


def _holds(rect: Rect, row: int, col: int) -> bool:
    return rect.row <= row < rect.row + rect.rows and rect.col <= col < rect.col + rect.cols


def save_run_checkpoint(to: Path) -> Path:
    """A run's checkpoint of the policy as it is."""
    trainer = _now[0].trainer
    state = {"step": 1, "policy_version": 1, "precision": trainer.precision.model_dump(mode="json")}
    checkpoints.save(to, trainer.model, trainer.hf_config, trainer.folder, state)
    return to


def masters() -> dict[str, torch.Tensor]:
    """FP32 masters under Hugging Face names."""
    return _now[0].trainer.collect_tensors(fp8=False)


def export(checkpoint: Path, to: Path, precision: str) -> Path:
    """The command `export`, in a process that is in no world yet."""
    from megatron_rl.mcore.model import stop_megatron

    stop_megatron()
    export_checkpoint(checkpoint, to, precision)
    stop_megatron()
    return to


def restart_engine(engine_model: Path, folder: Path) -> int:
    """Ends the engine and starts a fresh one on another checkpoint."""
    served = _now[0]
    served.engine.stop()
    served.engine = start_engine_and_wait(served.config, engine_model, folder)
    return served.engine.process.pid


def generate_until_it_fails(prompts: list[list[int]]) -> tuple[str, str]:
    """Generates long answers again and again: (the line, the log tail) of the RunError that ends it."""
    while True:
        try:
            generate(prompts, tokens=200)
        except RunError as error:
            return str(error), error.log_tail


def stop_twice() -> None:
    _now[0].engine.stop()
    _now[0].engine.stop()
