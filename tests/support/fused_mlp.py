"""A trainer whose MLPs quantize SwiGLU as it is computed, and by one kernel after the other; stand-ins play kernels and libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.mcore.layers import spec
from megatron_rl.mcore.passes.activation_hooks import record_activations
from support import fake_gpu_libraries
from support.trainer import Trainer, own


def run(folder: Path, batch: list[TrainingSample], precision: dict[str, Any], recompute: str, fused: bool) -> dict[str, Any]:
    """Log-probs, gradients, how often SwiGLU ran as an operator of its own, and whether a recording sees its result."""
    calls = mock.Mock(side_effect=swiglu.swiglu)
    make_backend.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        patch.setattr(swiglu, "is_fused", lambda: True)
        patch.setattr(spec.swiglu, "swiglu", calls)
        if not fused:
            patch.setattr(spec, "can_fuse_swiglu", lambda *_: False)
        trainer = Trainer(folder, precision, {"learning_rate": 1e-12, "clip_grad": 0.0, "recompute": recompute, "micro_batch_tokens": 1000})
        logprobs, _ = trainer.actor.compute_logprobs(batch)
        trainer.actor.update(own(batch), negative_log_likelihood)
        gradients = {name: weight.main_grad.clone() for name, weight in trainer.model.named_parameters()}
        operators = calls.call_count
        with record_activations(trainer.model) as seen:
            trainer.actor.compute_logprobs(batch[:1])
    make_backend.cache_clear()
    widths = {name: tensor.shape[-1] for name, tensor in seen.items() if name.endswith("swiglu")}
    return {"logprobs": torch.cat(logprobs), "gradients": gradients, "operators": operators, "recorded": widths}


def fused_and_not(folder: Path, batch: list[TrainingSample], precision: dict[str, Any], recompute: str) -> list[dict[str, Any]]:
    return [run(folder, batch, precision, recompute, fused) for fused in (True, False)]
