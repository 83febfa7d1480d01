"""The trainer's rotary positions and SwiGLU on a GPU, run on a CPU: what Megatron's operators give, without asking for lengths."""

from __future__ import annotations

import pytest
from support import trainer
from support.models import FP32, random_sequences

from parallel.families import FAMILIES

SHORT = "glm4", "deepseek_v3"
"""Pairs next to each other in half of a head; latent attention with YaRN's positions, experts and shared experts."""


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_logprobs_and_gradients_are_those_of_megatrons_operators(worlds, model_folder, name):
    folder = model_folder(name, num_hidden_layers=2)
    (wanted, gradients), (logprobs, found) = worlds(1).call(trainer.both_kinds_of_operators, folder, FP32, random_sequences(5, seed=1))[0]
    assert (logprobs - wanted).abs().max() < 1e-5 and wanted.std() > 0.1
    for weight, gradient in gradients.items():
        assert (gradient - found[weight]).norm() <= 1e-5 * gradient.norm(), weight
