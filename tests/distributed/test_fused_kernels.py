"""The trainer's GPU paths, run on a CPU with stand-ins for the kernels, compute what separate operators compute."""

from __future__ import annotations

import pytest
import torch
from support import fused_kernels, trainer
from support.fused_kernels import with_and_without
from support.models import FP8, FP32, random_sequences

from parallel.families import FAMILIES
from parallel.layout import Layout

LAYERS, SPARSE, EXPERTS = 2, 1, 8
"""Layers, layers with experts, and experts of each of those."""
BATCH = random_sequences(6, seed=1)


def long(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.long)


def assert_gradients(gradients: dict, expected: dict, bound: float) -> None:
    """Assert that the relative distance of every gradient is within the bound."""
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= bound * expected[name].norm(), name


@pytest.mark.parametrize(
    "backend, reduction, recompute, ranks",
    [
        ("transformer_engine", "fast", "none", 1),
        long("transformer_engine", "fast", "none", 2),
        long("deep_gemm", "fast", "selective", 1),
        long("deep_gemm", "tree", "none", 2),
    ],
)
def test_quantized_swiglu_changes_no_bit(worlds, model_folder, backend, reduction, recompute, ranks):
    precision = {"mode": "fp8_unified", "backend": backend, "reduction": reduction}
    args = fused_kernels.quantize_swiglu, model_folder("qwen3", num_hidden_layers=2), BATCH, precision, recompute
    for fused, alone in worlds(ranks).call(with_and_without, *args):
        assert torch.equal(fused["logprobs"], alone["logprobs"]) and alone["logprobs"].std() > 0.1
        assert_gradients(fused["gradients"], alone["gradients"], 0)
        assert all(gradient.any() for gradient in alone["gradients"].values())
        assert fused["operators"] == 0 < alone["operators"]
        assert fused["recorded"] == alone["recorded"] and len(fused["recorded"]) == 2, "a recording still sees SwiGLU's result"


@pytest.mark.parametrize(
    "backend, reduction, recompute, ranks",
    [
        ("transformer_engine", "fast", "none", 2),
        ("deep_gemm", "tree", "full", 1),
        ("deep_gemm", "fast", "selective", 1),
        long("transformer_engine", "fast", "none", 1),
    ],
)
def test_quantized_norms_keep_the_bits_of_log_probs(worlds, model_folder, backend, reduction, recompute, ranks):
    precision = {"mode": "fp8_unified", "backend": backend, "reduction": reduction}
    args = fused_kernels.quantize_norms, model_folder("qwen3", num_hidden_layers=2), BATCH, precision, recompute
    for fused, alone in worlds(ranks).call(with_and_without, *args):
        assert torch.equal(fused["logprobs"], alone["logprobs"]) and alone["logprobs"].std() > 0.1
        assert_gradients(fused["gradients"], alone["gradients"], 0.02)  # the norm rounds elsewhere
        added = {"none": [False, True, True, True], "full": [False, True, False, True], "selective": [False, True]}[recompute]
        assert fused["calls"][: len(added)] == added and not alone["calls"], "which norms add the residual, layer by layer"
        assert fused["in_vain"] == alone["in_vain"] == 0, "log-probs quantize nothing for WGrad"
        assert fused["recorded"] == alone["recorded"] and fused["recorded"], "a recording still sees a norm's result"


@pytest.mark.parametrize("model, groups, ranks", [("qwen3", 2, 1), ("qwen2", 2, 1), ("qwen3", 1, 2)])
def test_queries_and_keys_in_one_pass_are_the_same(worlds, model_folder, model, groups, ranks):
    """In the last case two ranks share a key-value head."""
    args = fused_kernels.rotate_heads, model_folder(model, num_hidden_layers=2, num_key_value_heads=groups), BATCH
    for fused, alone in worlds(ranks).call(with_and_without, *args):
        assert fused["calls"] == 4 and not alone["calls"], "two layers, for log-probs and for gradients"
        assert torch.allclose(fused["logprobs"], alone["logprobs"], atol=0.02) and alone["logprobs"].std() > 0.1
        assert_gradients(fused["gradients"], alone["gradients"], 0.02)


@pytest.mark.parametrize("name", [name if name in ("glm4", "deepseek_v3") else long(name) for name in FAMILIES])
def test_rotary_positions_and_swiglu_on_a_gpu_are_megatrons(worlds, model_folder, name):
    args = fused_kernels.run_gpu_operators, model_folder(name, num_hidden_layers=2), FP32, BATCH[:5]
    ours, megatrons = worlds(1).call(with_and_without, *args)[0]
    assert (ours["logprobs"] - megatrons["logprobs"]).abs().max() < 1e-5 and ours["logprobs"].std() > 0.1
    assert_gradients(ours["gradients"], megatrons["gradients"], 1e-5)


@pytest.mark.parametrize(
    "kind, precision, layout",
    [
        ("deepseek_v3", FP32, Layout()),
        long("deepseek_v3", FP8, Layout()),
        long("deepseek_direct_q", FP32, Layout()),
        long("deepseek_v3", FP32, Layout(tp=2)),
    ],
)
def test_absorbed_latent_attention_is_the_expanded_one(worlds, model_folder, kind, precision, layout):
    args = fused_kernels.absorb_latents, model_folder(kind, num_hidden_layers=2), precision, BATCH[:5], layout
    absorbed, expanded = worlds(layout.world_size).call(with_and_without, *args)[0]
    bound = 1e-5 if precision is FP32 else 0.1  # in FP8 the order of sums moves single activations to the next E4M3 number
    assert (absorbed["logprobs"] - expanded["logprobs"]).abs().max() < bound and absorbed["logprobs"].std() > 0.1
    assert_gradients(absorbed["gradients"], expanded["gradients"], bound)
    assert all(gradient.any() for gradient in expanded["gradients"].values())


@pytest.mark.long
def test_latent_attention_without_sequence_parallelism_has_the_gradients_of_one_process(worlds, model_folder):
    folder = model_folder("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2)  # Megatron demands it for experts
    batches = [random_sequences(7, seed=1), random_sequences(5, seed=2)]
    plain = {"micro_batch_tokens": 60, "adam_eps": 1e-4, "layout": {"sequence_parallel": False}}
    alone, result = (worlds(tp).call(trainer.train_grpo, folder, FP32, plain, batches, Layout(tp=tp, etp=1))[0] for tp in (1, 2))
    for step, wanted in zip(result["steps"], alone["steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert (result["after"] - alone["after"]).abs().max() < 1e-4 * alone["after"].std()


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.long)])
def test_grouped_products_train_as_one_expert_after_the_other(worlds, model_folder, recompute):
    folder = model_folder("qwen3_moe", num_hidden_layers=LAYERS, num_experts=EXPERTS)
    grouped, alone = worlds(1).call(with_and_without, fused_kernels.group_experts, folder, BATCH, recompute)[0]
    for name in ("logprobs", "after"):
        assert (grouped[name] - alone[name]).abs().max() < 0.05 and alone[name].std() > 0.1
    assert (grouped["after"] - grouped["logprobs"]).abs().max() > 0.01, "the new blocks are contiguous again"
    for name, gradient in grouped["gradients"].items():
        assert (gradient - alone["gradients"][name]).norm() <= 0.05 * gradient.norm(), name
    # two linear layers of every expert: FProp and DGrad, and FProp again if it is recomputed; WGrad
    assert grouped["calls"]["m_grouped_fp8_gemm_nt_contiguous"] == SPARSE * 2 * (3 if recompute == "selective" else 2)
    assert grouped["calls"]["k_grouped_fp8_gemm_nt_contiguous"] == SPARSE * 2
    assert grouped["in_place"] == [True, True], "WGrad adds to gradients that are contiguous"
    others = grouped["calls"]["fp8_gemm_nt"]
    assert alone["calls"]["fp8_gemm_nt"] - others > SPARSE * 2 * 3 * EXPERTS / 2 and others <= LAYERS * 4 * 4
    assert all(detail.endswith("DeepGemmExperts") for detail in grouped["details"] if "Linear" in detail)
    assert not any("DeepGemmExperts" in detail for detail in alone["details"])


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), pytest.param(Layout(tp=2, dp=2, ep=4, etp=1), marks=pytest.mark.long)])
def test_without_gradient_bytes_and_scales_go_to_the_experts_for_the_same_bits(worlds, model_folder, layout):
    folder = model_folder("qwen3_moe", num_hidden_layers=LAYERS, num_experts=EXPERTS)
    ranks = worlds(layout.world_size).call(with_and_without, fused_kernels.dispatch_packed, folder, BATCH, layout)
    for packed, whole in ranks:
        assert packed["logprobs"].std() > 0.1 and (packed["after"] - packed["logprobs"]).abs().max() > 0.01
        assert torch.equal(packed["logprobs"], whole["logprobs"]) and torch.equal(packed["after"], whole["after"])
        assert packed["updated"] == whole["updated"] and "int32" not in whole["scored"]
    packed, whole = ({name: sum(rank[way]["scored"].get(name, 0) for rank in ranks) for name in ("int32", "bfloat16")} for way in (0, 1))
    one_way = whole["bfloat16"] // 2  # to the experts, or back; a token's weights are FP32
    assert packed == {"int32": one_way * (1 + 4 / 128) / 2, "bfloat16": one_way}
