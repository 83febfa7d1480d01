"""Experts in grouped products, in the live path: what they give one after the other, in three kernels a layer however many there are."""

from __future__ import annotations

import pytest
from support import expert_groups
from support.models import random_sequences

LAYERS, SPARSE, EXPERTS = 2, 1, 8
"""Layers, those with experts, and experts of each."""


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.long)])
def test_grouped_products_train_as_one_expert_after_the_other(worlds, model_folder, recompute):
    folder = model_folder("qwen3_moe", num_hidden_layers=LAYERS, num_experts=EXPERTS)
    grouped, alone = worlds(1).call(expert_groups.grouped_and_one_by_one, folder, random_sequences(6, seed=1), recompute)[0]
    for name in ("before", "after"):
        assert (grouped[name] - alone[name]).abs().max() < 0.05 and alone[name].std() > 0.1
    assert (grouped["after"] - grouped["before"]).abs().max() > 0.01, "new blocks are laid end to end anew"
    for name, gradient in grouped["gradients"].items():
        assert (gradient - alone["gradients"][name]).norm() <= 0.05 * gradient.norm(), name
    # two linear layers of every expert: FProp and DGrad, and FProp again where it is recomputed; WGrad
    assert grouped["calls"]["m_grouped_fp8_gemm_nt_contiguous"] == SPARSE * 2 * (3 if recompute == "selective" else 2)
    assert grouped["calls"]["k_grouped_fp8_gemm_nt_contiguous"] == SPARSE * 2
    others = grouped["calls"]["fp8_gemm_nt"]
    assert alone["calls"]["fp8_gemm_nt"] - others > SPARSE * 2 * 3 * EXPERTS / 2 and others <= LAYERS * 4 * 4
    assert all(detail.endswith("DeepGemmExperts") for detail in grouped["details"] if "Linear" in detail)
    assert not any("DeepGemmExperts" in detail for detail in alone["details"])
