"""Experts in grouped products, in the live path: what they give one after the other, in three kernels a layer however many there are."""

from __future__ import annotations

import pytest
import torch
from support import expert_groups
from support.models import random_sequences

from parallel.layout import Layout

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
    assert grouped["in_place"] == [True, True], "WGrad adds to gradients that lie end to end"
    others = grouped["calls"]["fp8_gemm_nt"]
    assert alone["calls"]["fp8_gemm_nt"] - others > SPARSE * 2 * 3 * EXPERTS / 2 and others <= LAYERS * 4 * 4
    assert all(detail.endswith("DeepGemmExperts") for detail in grouped["details"] if "Linear" in detail)
    assert not any("DeepGemmExperts" in detail for detail in alone["details"])


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), pytest.param(Layout(tp=2, dp=2, ep=4, etp=1), marks=pytest.mark.long)])
def test_without_gradient_bytes_and_scales_go_to_the_experts_for_the_same_bits(worlds, model_folder, layout):
    folder = model_folder("qwen3_moe", num_hidden_layers=LAYERS, num_experts=EXPERTS)
    ranks = worlds(layout.world_size).call(expert_groups.packed_and_whole, folder, random_sequences(6, seed=1), layout)
    for packed, whole in ranks:
        assert packed["before"].std() > 0.1 and (packed["after"] - packed["before"]).abs().max() > 0.01
        assert torch.equal(packed["before"], whole["before"]) and torch.equal(packed["after"], whole["after"])
        assert packed["updated"] == whole["updated"] and "int32" not in whole["scored"]
    packed, whole = ({name: sum(rank[way]["scored"].get(name, 0) for rank in ranks) for name in ("int32", "bfloat16")} for way in (0, 1))
    one_way = whole["bfloat16"] // 2  # to the experts, or back; a token's weights are FP32
    assert packed == {"int32": one_way * (1 + 4 / 128) / 2, "bfloat16": one_way}
