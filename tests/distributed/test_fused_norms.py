"""Norms that are quantized as they are computed, and queries and keys in one pass, in the live path: as one kernel after the other."""

from __future__ import annotations

import pytest
import torch
from support import fused_norms
from support.models import random_sequences


@pytest.mark.parametrize(
    "backend, reduction, recompute, ranks",
    [
        ("transformer_engine", "fast", "none", 1),
        ("deep_gemm", "tree", "full", 1),
        ("deep_gemm", "fast", "selective", 1),
        ("transformer_engine", "fast", "none", 2),
    ],
)
def test_log_probs_keep_their_bits_and_gradients_come_through(worlds, model_folder, backend, reduction, recompute, ranks):
    folder = model_folder("qwen3", num_hidden_layers=2)
    precision = {"mode": "fp8_unified", "backend": backend, "reduction": reduction}
    for fused, alone in worlds(ranks).call(fused_norms.fused_and_not, folder, random_sequences(6, seed=1), precision, recompute):
        assert torch.equal(fused["logprobs"], alone["logprobs"]) and alone["logprobs"].std() > 0.1
        for name, gradient in fused["gradients"].items():
            wanted = alone["gradients"][name]
            assert (gradient - wanted).norm() < 0.02 * wanted.norm(), f"{name}: more than other roundings within the norm"
        once = [False, True, True, True] if recompute == "none" else [False, True, False, True] if recompute == "full" else [False, True]
        assert fused["calls"][: len(once)] == once and not alone["calls"], "which norms add up the stream, layer by layer"
        assert fused["in_vain"] == alone["in_vain"] == 0, "log-probs make nothing for WGrad"
        assert fused["recorded"] == alone["recorded"] and fused["recorded"], "who looks at a norm's result finds it"


@pytest.mark.parametrize("model, groups, ranks", [("qwen3", 2, 1), ("qwen2", 2, 1), ("qwen3", 1, 2)])
def test_queries_and_keys_in_one_pass_are_the_same(worlds, model_folder, model, groups, ranks):
    """Also where two ranks share a key-value head."""
    folder = model_folder(model, num_hidden_layers=2, num_key_value_heads=groups)
    for fused, alone in worlds(ranks).call(fused_norms.heads_at_once_and_not, folder, random_sequences(6, seed=1)):
        assert fused["calls"] == 4 and not alone["calls"], "layers of a pass for log-probs and of one for gradients"
        assert torch.allclose(fused["logprobs"], alone["logprobs"], atol=0.02) and alone["logprobs"].std() > 0.1
        for name, gradient in fused["gradients"].items():
            assert (gradient - alone["gradients"][name]).norm() < 0.02 * alone["gradients"][name].norm(), name
