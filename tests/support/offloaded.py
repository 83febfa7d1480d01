"""An actor whose optimizer state leaves the device between steps: run in the ranks of a `World`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.mcore.checkpoint.optimizer import MOMENTS, flatten_chained, iter_fp32_masters
from megatron_rl.mcore.checkpoint.write import CheckpointWriter
from parallel.layout import Layout
from support.trainer import Trainer


def train(
    folder: Path, to: Path, precision: dict[str, Any], batches: list[list[TrainingSample]], offload: bool, dp: int = 1
) -> dict[str, Any]:
    """Steps with the state away between them, where `offload`: bytes held, log-probs and a checkpoint in between, and what it tells."""
    trainer = Trainer(folder, precision, {"learning_rate": 3e-3}, layout=Layout(dp=dp))
    actor, away = trainer.actor, trainer.actor._offload
    gradients, logprobs, addresses = [], [], []
    for number, batch in enumerate(batches):
        away.reload()
        away.reload()
        actor.update(batch, PolicyLoss(AlgorithmConfig()))
        addresses.append(_addresses(actor.optimizer))
        if offload:
            away.offload()
            away.offload()
        addresses.append(_addresses(actor.optimizer))
        gradients.append(sum(buffer.grad_data.untyped_storage().nbytes() for buffer in away._buffers))
        logprobs.append(torch.cat(actor.compute_logprobs(batch)[0]))
        state = {"step": number, "precision": trainer.precision.model_dump(mode="json")}
        CheckpointWriter(to / f"step_{number:05d}", trainer.model, trainer.hf_config, folder, state, actor.optimizer).finish()
    return {"gradients": gradients, "logprobs": torch.cat(logprobs), "addresses": addresses, "held": trainer.dump_bytes()}


def _addresses(optimizer: Any) -> list[int]:
    """Of moments and separate masters."""
    found = []
    for part in flatten_chained(optimizer):
        found += [state[kind].data_ptr() for state in part.optimizer.state.values() for kind in MOMENTS]
        found += [master.data_ptr() for _, master in iter_fp32_masters(part)]
    return found
