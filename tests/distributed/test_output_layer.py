"""The output layer that scores a few rows at a time gives the log-probs of whole logits bit for bit, and their gradients."""

from __future__ import annotations

import pytest
import torch
from support import trainer
from support.models import FP8, FP32, random_sequences

BF16 = {"mode": "bf16", "high": "bf16"}
TOLERANCE = {("bf16", "fp32"): 1e-5, ("bf16", "bf16"): 1e-2, ("fp8_unified", "fp32"): 5e-2, ("fp8_unified", "bf16"): 5e-2}
"""Relative: a gradient in its last bit moves some values to the next E4M3 number."""
CASES = [
    ("qwen3", FP8, 1.0, 1),
    ("qwen2", FP32, 0.7, 1),  # tied
    ("qwen2", BF16, 1.0, 2),
    ("qwen3", FP32, 0.7, 2),
    ("qwen3_moe", {**FP8, "high": "bf16"}, 1.0, 2),
]


@pytest.mark.parametrize("name, precision, temperature, ranks", CASES)
def test_chunks_of_rows_give_what_whole_logits_give(worlds, model_folder, name, precision, temperature, ranks):
    samples = random_sequences(6, seed=1)
    for scored, whole in worlds(ranks).call(trainer.scored_and_whole, model_folder(name), precision, samples, temperature):
        assert torch.equal(scored[0], whole[0]) and len(scored[0]) > 40 and scored[0].std() > 0.1
        for weight, gradient in whole[1].items():
            distance = (scored[1][weight] - gradient).norm() / gradient.norm()
            assert distance < TOLERANCE[precision["mode"], precision["high"]], (weight, distance)
