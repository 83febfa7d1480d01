"""A scripted engine that differs from the trainer by one planted cause, and the ladder that has to find it; run in a `World`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.mcore.engine_emulation import emulate_engine
from megatron_rl.training.mismatch_attribution import MismatchAttribution
from support.trainer import Trainer

CHANGED = "linear_fc1.weight"


def measure_causes(folder: Path, precision: dict[str, Any], batch: list[TrainingSample], fault: str = "") -> dict[str, float]:
    """The metrics of the ladder. `fault`: the engine computes a little otherwise ("kernels"), scales its inputs in the other format
    ("activations"), holds a first scale that is twice as large ("weights"), or an optimizer step follows ("version")."""
    trainer = Trainer(folder, precision)
    actor, named_tensors, activations = trainer.actor, trainer.collect_named_tensors(), trainer.contract.activation_format
    if fault == "activations":
        activations = {"pow2": "fp32", "fp32": "pow2"}[activations or ""]
    if fault == "weights":
        name = next(name for name in named_tensors if f"{CHANGED}_scale" in name)
        named_tensors[name] = named_tensors[name].clone()
        named_tensors[name].view(-1)[0] *= 2
    with emulate_engine(actor.model, named_tensors, activations):
        sampled = actor.compute_logprobs(batch)[0]
    for answer, engine, own in zip(batch, sampled, actor.compute_logprobs(batch)[0], strict=True):
        answer.rollout_logprobs = engine + 0.01 * torch.randn(engine.shape, generator=torch.Generator().manual_seed(0)) * (
            fault == "kernels"
        )
        answer.old_logprobs = own
    causes = MismatchAttribution(actor, lambda: named_tensors, activations)
    causes.measure(batch)
    if fault == "version":
        actor.update(batch, PolicyLoss(AlgorithmConfig()))
    return causes.finish()
