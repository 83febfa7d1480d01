"""Packed sequences compute what each computes alone, in every architecture: the same log-probs, the same gradients."""

from __future__ import annotations

import pytest
import torch
from support import trainer
from support.models import ARCHITECTURES, FP8, FP32, make_model, random_sequences

BOUNDS = [1, 60, 10000]
"""Tokens of a micro-batch: every sequence alone, a few together, all in one row."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), ARCHITECTURES[request.param])


@pytest.mark.parametrize("precision", [FP32, FP8], ids=["fp32", "fp8"])
def test_packed_equals_alone(model, one, precision):
    """In unified FP8 log-probs have the same bits, in every architecture. So have the gradients between operators, or else single values
    would move to the next E4M3 number, and weights' gradients by percents: what is left is the order of sums."""
    alone, found = one.call(trainer.packed_and_alone, model, precision, random_sequences(7, seed=1), BOUNDS)[0]
    assert alone.std() > 0.1
    expected = found[0][1]
    for logprobs, gradients in found:
        assert torch.equal(logprobs, alone) if precision is FP8 else (logprobs - alone).abs().max() < 1e-5
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
