"""Packed sequences compute what each computes alone, in every architecture: the same log-probs, the same gradients."""

from __future__ import annotations

import pytest
import torch
from support.models import ARCHITECTURES, FP8, FP32, make_model, random_sequences

pytestmark = pytest.mark.slow

BOUNDS = [1, 60, 10000]
"""Tokens of a micro-batch: every sequence alone, a few together, all in one row."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), ARCHITECTURES[request.param])


def test_packed_equals_alone(model, one):
    batch = random_sequences(7, seed=1)
    alone, found = one.call("support.packed:packed_and_alone", model, FP32, batch, BOUNDS)[0]
    assert alone.std() > 0.1
    expected = found[0][1]
    for logprobs, gradients in found:
        assert (logprobs - alone).abs().max() < 1e-5
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_in_unified_fp8_every_bit_is_the_same(model, one):
    """Its gradients are not: the weight gradient's operands are quantised in groups of 128 tokens, whoever shares them."""
    alone, found = one.call("support.packed:packed_and_alone", model, FP8, random_sequences(7, seed=1), BOUNDS)[0]
    for logprobs, _ in found:
        assert torch.equal(logprobs, alone)
