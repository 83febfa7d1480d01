"""A policy of one transformer layer or of a few, with random weights, for the parts that compute with whole layers."""

from __future__ import annotations

import torch
from bench_step import loss, sequence

from gpu_parts.sizes import SIZES
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import ArchitectureConfig, PrecisionConfig, TrainConfig
from megatron_rl.hf.create import make_hf_config
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.model import build_model
from megatron_rl.mcore.names import get_model_chunks
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout

__all__ = ["SIZES", "actor", "batch_of", "loss", "model"]


def model(architecture: ArchitectureConfig, precision: PrecisionConfig) -> torch.nn.Module:
    """With the same random weights for the same widths and precision.mode. Megatron must be started."""
    (chunk,) = get_model_chunks(
        build_model(make_hf_config(architecture, 0, precision.high), Layout(), PrecisionContract.from_config(precision))
    )
    with torch.no_grad():
        for number, parameter in enumerate(chunk.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=torch.Generator(parameter.device).manual_seed(number))
    return chunk


def actor(architecture: ArchitectureConfig, precision: PrecisionConfig) -> Actor:
    return Actor(model(architecture, precision), TrainConfig(learning_rate=1e-6, clip_grad=0.0), temperature=1.0)


def batch_of(tokens: int, length: int) -> list[TrainingSample]:
    """Random sequences of `length` tokens, half of each an answer; `tokens` in all."""
    return [sequence(length, seed) for seed in range(max(tokens // length, 1))]
