"""A new model: transformers reads its config.json, and its weights are what a seed says."""

from __future__ import annotations

import json

import pytest
import torch

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config, make_random_tensors


def test_transformers_reads_a_new_config(tmp_path):
    from transformers import AutoConfig

    def read(architecture: ArchitectureConfig, dtype: str):
        (tmp_path / "config.json").write_text(json.dumps(make_hf_config(architecture, 7, dtype)))
        return AutoConfig.from_pretrained(tmp_path)

    dense = read(ArchitectureConfig(hidden_size=384, tie_word_embeddings=True, rope_theta=5000.0), "bf16")
    assert (type(dense).__name__, dense.hidden_size, dense.tie_word_embeddings, dense.eos_token_id) == ("Qwen3Config", 384, True, 7)
    assert dense.dtype == torch.bfloat16
    widths = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
    moe = read(ArchitectureConfig(**widths), "fp32")
    assert (type(moe).__name__, moe.norm_topk_prob, moe.decoder_sparse_step, moe.mlp_only_layers) == ("Qwen3MoeConfig", True, 1, [])
    assert {name: getattr(moe, name) for name in widths} == widths


def test_random_weights_repeat_with_the_seed_and_norms_are_one():
    config = make_hf_config(ArchitectureConfig(num_hidden_layers=1), 0, "fp32")
    first, again, other = (make_random_tensors(config, seed) for seed in (1, 1, 2))
    weight, norm = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"
    assert torch.equal(first[weight], again[weight]) and not torch.equal(first[weight], other[weight])
    assert (first[norm] == 1).all() and all(tensor.dtype == torch.float32 for tensor in first.values())
    assert first[weight].std().item() == pytest.approx(0.02, rel=0.02) and abs(first[weight].mean().item()) < 1e-3
