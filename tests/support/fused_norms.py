"""A trainer whose norms quantize their results as they compute them, or whose queries and keys are made in one pass, and one whose kernels
run one after the other; stand-ins and references play them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.rope import reference as rope
from megatron_rl.mcore import actor
from megatron_rl.mcore.layers import norms
from megatron_rl.mcore.layers.attention import self_attention
from megatron_rl.mcore.passes.activation_hooks import record_activations
from support import fake_gpu_libraries
from support.trainer import Trainer, own


def run_norms(folder: Path, batch: list[TrainingSample], precision: dict[str, Any], recompute: str, fused: bool) -> dict[str, Any]:
    """Log-probs, gradients, whether each run of a norm's kernel added, what a recording sees of norms; how often log-probs quantized for
    WGrad."""
    make_backend.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        patch.setattr(norms, "is_fused", lambda _: fused)
        patch.setattr(actor, "count_row_multiple", lambda config, *_: 128 * config.tensor_model_parallel_size)
        kernels: Any = sys.modules["megatron_rl.kernels.norm.triton"]
        patch.setattr(kernels, "quantize_norm", kernel := mock.Mock(side_effect=kernels.quantize_norm))
        quantizers: Any = sys.modules["megatron_rl.kernels.quantize.triton"]
        patch.setattr(quantizers, "quantize_activation", quantizer := mock.Mock(side_effect=quantizers.quantize_activation))
        trainer = Trainer(folder, precision, {"learning_rate": 1e-12, "clip_grad": 0.0, "recompute": recompute, "micro_batch_tokens": 1000})
        logprobs, _ = trainer.actor.compute_logprobs(batch)
        in_vain = [call for call in (*kernel.call_args_list, *quantizer.call_args_list) if call.kwargs["columns"]]
        calls = [call.args[1] is not None for call in kernel.call_args_list]
        trainer.actor.update(own(batch), negative_log_likelihood)
        gradients = {name: weight.main_grad.clone() for name, weight in trainer.model.named_parameters()}
        with record_activations(trainer.model) as seen:
            trainer.actor.compute_logprobs(batch[:1])
    make_backend.cache_clear()
    recorded = {name: tensor.shape[-1] for name, tensor in seen.items() if name.endswith("norm")}
    return {"logprobs": torch.cat(logprobs), "gradients": gradients, "calls": calls, "recorded": recorded, "in_vain": len(in_vain)}


def fused_and_not(folder: Path, batch: list[TrainingSample], precision: dict[str, Any], recompute: str) -> list[dict[str, Any]]:
    return [run_norms(folder, batch, precision, recompute, fused) for fused in (True, False)]


def run_heads(folder: Path, batch: list[TrainingSample], fused: bool) -> dict[str, Any]:
    """Log-probs, gradients, and how often queries and keys were made in one pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "rotates_rows", lambda _: True)
        patch.setattr(self_attention, "can_rotate", lambda *_: fused)
        patch.setattr(self_attention, "split_heads", split := mock.Mock(side_effect=self_attention.split_heads))
        trainer = Trainer(folder, {"mode": "bf16"}, {"learning_rate": 1e-12, "clip_grad": 0.0, "micro_batch_tokens": 1000})
        logprobs, _ = trainer.actor.compute_logprobs(batch)
        trainer.actor.update(own(batch), negative_log_likelihood)
        gradients = {name: weight.main_grad.clone() for name, weight in trainer.model.named_parameters()}
    return {"logprobs": torch.cat(logprobs), "gradients": gradients, "calls": split.call_count}


def heads_at_once_and_not(folder: Path, batch: list[TrainingSample]) -> list[dict[str, Any]]:
    return [run_heads(folder, batch, fused) for fused in (True, False)]
