"""SwiGLU that is computed as its result is quantized, in the live path: the bits of one kernel after the other."""

from __future__ import annotations

import pytest
import torch
from support import fused_mlp
from support.models import random_sequences


@pytest.mark.parametrize(
    "backend, reduction, recompute, ranks",
    [
        ("transformer_engine", "fast", "none", 1),
        pytest.param("transformer_engine", "fast", "none", 2, marks=pytest.mark.long),
        pytest.param("deep_gemm", "fast", "selective", 1, marks=pytest.mark.long),
        pytest.param("deep_gemm", "tree", "none", 2, marks=pytest.mark.long),
    ],
)
def test_log_probs_and_gradients_keep_their_bits(worlds, model_folder, backend, reduction, recompute, ranks):
    folder = model_folder("qwen3", num_hidden_layers=2)
    precision = {"mode": "fp8_unified", "backend": backend, "reduction": reduction}
    for fused, alone in worlds(ranks).call(fused_mlp.fused_and_not, folder, random_sequences(6, seed=1), precision, recompute):
        assert torch.equal(fused["logprobs"], alone["logprobs"]) and alone["logprobs"].std() > 0.1
        for name, gradient in fused["gradients"].items():
            assert torch.equal(gradient, alone["gradients"][name]) and gradient.any(), name
        assert fused["operators"] == 0 < alone["operators"]
        assert fused["recorded"] == alone["recorded"] and len(fused["recorded"]) == 2, "who looks at SwiGLU's result finds it"
