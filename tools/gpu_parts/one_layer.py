"""A policy of one transformer layer with random weights, for the parts that compute with a whole layer."""

from __future__ import annotations

import torch
from bench_step import loss, sequence

from megatron_rl import hf
from megatron_rl.batch import Sequence
from megatron_rl.config import Architecture, Precision, Train
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.model import build_model
from megatron_rl.mcore.names import chunks_of
from megatron_rl.precision import PrecisionContract
from parallel.layout import Layout

__all__ = ["SIZES", "actor", "batch_of", "loss"]

SIZES = {
    "small": Architecture(hidden_size=1024, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1),
    "8B": Architecture(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1),
    "32B": Architecture(hidden_size=5120, intermediate_size=25600, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=1),
}

"""Widths of a layer of Llama-3.1-8B and of Qwen3-32B, as in tools/bench_backends.py; the vocabulary stays small. DeepGEMM compiles a kernel
for every shape, in seconds each: `small` has few shapes, and the others are those that `speed_linears` has compiled."""


def actor(architecture: Architecture, precision: Precision) -> Actor:
    """With the same random weights for the same widths and precision.mode. Megatron must be started."""
    (model,) = chunks_of(build_model(hf.new_config(architecture, 0, precision.high), Layout(), PrecisionContract.of(precision)))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=torch.Generator(parameter.device).manual_seed(number))
    return Actor(model, Train(learning_rate=1e-6, clip_grad=0.0), temperature=1.0)


def batch_of(tokens: int, length: int) -> list[Sequence]:
    """Random sequences of `length` tokens, half of each an answer; `tokens` in all."""
    return [sequence(length, seed) for seed in range(max(tokens // length, 1))]
