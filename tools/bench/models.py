"""What the benches of training steps share: random models, samples and a loss."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import ArchitectureConfig, PrecisionConfig, TrainConfig
from megatron_rl.hf.create import make_hf_config
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.model import build_model
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout

PRECISIONS = {
    "fp8": PrecisionConfig(mode="fp8_unified", high="bf16"),
    "bf16": PrecisionConfig(mode="bf16", high="bf16"),
    "fp32": PrecisionConfig(mode="bf16", high="fp32"),
}


def make_architecture(layers: int, hidden: int) -> ArchitectureConfig:
    """Return a Qwen3 model's widths: heads of 128, an MLP three times as wide as the model."""
    return ArchitectureConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        head_dim=128,
        num_attention_heads=max(hidden // 128, 2),
        num_key_value_heads=2,
    )


def describe_widths(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Return the widths that a bench writes into its JSON file."""
    return architecture.model_dump(include={"num_hidden_layers", "hidden_size", "intermediate_size", "head_dim"})


def make_actor(architecture: ArchitectureConfig, precision: PrecisionConfig, train: TrainConfig) -> Actor:
    """Return an actor with random weights. Megatron must be started."""
    contract = PrecisionContract.from_config(precision)
    model: Any = build_model(make_hf_config(architecture, 0, precision.high), Layout(), contract)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            matrix = parameter.dim() > 1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 if matrix else torch.ones(parameter.shape))
    return Actor(model, train, temperature=1.0)


def make_sample(length: int, seed: int) -> TrainingSample:
    """Return `length` random tokens, the second half of them an answer."""
    ids = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TrainingSample(ids[: length // 2], ids[length // 2 :])


def compute_loss(logprobs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the negative log-likelihood of the answers' tokens."""
    return -(logprobs * batch.mask).sum(), {}
