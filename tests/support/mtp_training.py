"""Training of layers for multi-token prediction, on the ranks of a `World`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.checkpoint.checkpointing import CheckpointWriter, load_run_checkpoint
from parallel.layout import Layout
from support.trainer import Trainer, compute_logprobs, own


def train(
    folder: Path, precision: dict[str, Any], train: dict[str, Any], batches: list[list[TrainingSample]], layout: Layout
) -> dict[str, Any]:
    """One optimizer step on each batch; the log-probs before and after them, the metrics of the steps, and the whole model on rank 0."""
    trainer = Trainer(folder, precision, train, layout=layout)
    before = compute_logprobs(trainer.actor, batches[0])[0]
    metrics = [trainer.actor.update(own(batch), PolicyLoss(AlgorithmConfig())) for batch in batches]
    after = compute_logprobs(trainer.actor, batches[0])[0]
    return {"before": before, "after": after, "metrics": metrics, **_collect(trainer)}


def save(
    folder: Path, precision: dict[str, Any], train: dict[str, Any], batch: list[TrainingSample], to: Path, layout: Layout
) -> dict[str, Any]:
    """One optimizer step, then a checkpoint from which a run could go on; what it holds, on rank 0."""
    trainer = Trainer(folder, precision, train, layout=layout)
    trainer.actor.update(own(batch), PolicyLoss(AlgorithmConfig()))
    state = {"step": 1, "policy_version": 1, "precision": trainer.precision.model_dump(mode="json")}
    CheckpointWriter(to, trainer.model, read_config(folder), folder, state, trainer.actor.optimizer).finish()
    return _collect(trainer)


def resume(folder: Path, precision: dict[str, Any], train: dict[str, Any], run: Path, layout: Layout) -> dict[str, Any]:
    """What an actor holds that has loaded it, on rank 0."""
    trainer = Trainer(folder, precision, train, layout=layout)
    load_run_checkpoint(run, trainer.model, trainer.actor.optimizer, json.loads((run / "state.json").read_bytes()), same_layout=False)
    return _collect(trainer)


def _collect(trainer: Trainer) -> dict[str, Any]:
    return {"weights": trainer.collect_tensors(fp8=False), "blocks": trainer.collect_tensors(fp8=True)}
