"""An engine's forward passes run without a GPU: kernels accept SGLang's arguments, and planted faults are found."""

import json
from pathlib import Path

import pytest
from support.shipped import run_module

KINDS = {"bf16": "bf16", "ranks, bf16": "bf16", "int8": "int8", "int8 experts": "int8"}
"""Dtype of most matrix products by case. FP8 in all other cases."""
_DELTA = ("delta", "delta experts")
CACHES = ("cache", "cache, disaggregated", "delta, cache")
"""Cases whose attention is FlashInfer's. Its plans wait for lengths, once per pass and not in a replay."""
PLAIN = (
    "dense",
    "experts",
    "bf16",
    "int8",
    "tree",
    "disaggregated",
    "latent",
    "latent, two nodes",
    "router",
    "int8 experts",
    *_DELTA,
    *CACHES,
)
PLAN_WAITS = {(gpu, case): 5 + (gpu == "b200" and "delta" not in case) for gpu in ("h100", "b200") for case in CACHES}
"""Of a prefill: three for the cache's plan and two for that of the new tokens, and one more for CUTLASS's, which is made on the device."""
PLANTED = {
    "wrong_dtype": "rotate_head_tile: query_source [16, 2, 2, 128] is float32",
    "misaligned_weight": "does not begin at a multiple of 16 bytes",
    "unknown_kernel": "sgl_kernel.gelu_quick is not known",
    "wrong_precision": "self_attn.o_proj.weight is E4M3, and no FP8 product",
    "item_per_layer": "waits for the device (item) in every layer of the engine's prefill",
    "item_while_captured": "waits for the device (item) while a CUDA graph is captured",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The first engine rank by case."""
    found = run_module(
        "engine_rehearsals", str(tmp_path_factory.mktemp("engines")), "h100", *PLAIN, *PLANTED, path=str(Path(__file__).parent)
    )
    return json.loads(found.splitlines()[-1])


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("cases", [("ranks, slices",), ("ranks, splits",), ("ranks", "ranks, bf16")], ids=["slices", "splits", "plain"])
def test_an_engine_in_the_trainers_order_of_sums(tmp_path, cases):
    """The stand-ins of FlashAttention 3 and DeepGEMM check what decides the order."""
    ranks = json.loads(run_module("engine_rehearsals", str(tmp_path), "h100", *cases, path=str(Path(__file__).parent)).splitlines()[-1])
    for case in cases:
        check_passes(ranks[case], case, 8192, "h100")


@pytest.mark.long
@pytest.mark.parametrize("case", PLAIN)
def test_prompts_and_decoded_tokens_run(ranks, case):
    check_passes(ranks[case], case, 8192, "h100")


def check_passes(rank, case, prefill_tokens, gpu):
    forward = rank["forward"]
    assert not forward["fault"] and not rank["sync_fault"] and not rank["unknown"]
    assert forward["captured"] == [1, 16] and forward["decode_requests"] == 16 and forward["prefill_tokens"] == prefill_tokens
    assert [each["phase"] for each in forward["phases"]] == ["prefill", "decode", "decode, eager"]
    prefill, replayed, eager = forward["phases"]
    kind = KINDS.get(case, "fp8")
    assert prefill["flops"].keys() & {"fp8", "int8"} == {kind} - {"bf16"}
    if kind != "bf16":  # without those of attention, which a capture does not know
        assert replayed["flops"][kind] == eager["flops"][kind]  # a replay multiplies what its capture did
        assert prefill["flops"][kind] > 100 * eager["flops"][kind]
    waits = [sum(wait["count"] for wait in each["host_waits"]) for each in forward["phases"]]
    assert waits == ([PLAN_WAITS[gpu, case], 0, 2] if case in CACHES else [0, 0, 0])


@pytest.mark.long
def test_a_dense_layers_products_are_all_in_fp8(ranks):
    """Weights per layer: queries, keys and values, output, gate and up, down. Each of two ranks has half of them."""
    layer = 1024 * (8 + 2 * 4) * 128 + 8 * 128 * 1024 + 3 * 1024 * 2048
    assert ranks["dense"]["forward"]["phases"][0]["flops"]["fp8"] == 2 * 8192 * 2 * layer // 2


@pytest.mark.long
@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found(ranks, case):
    assert PLANTED[case] in ranks[case]["forward"]["fault"]


@pytest.fixture(scope="module")
def on_blackwell(tmp_path_factory):
    """The first engine rank by case."""
    found = run_module("engine_rehearsals", str(tmp_path_factory.mktemp("engines")), "b200", *PLAIN, path=str(Path(__file__).parent))
    return json.loads(found.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("case", PLAIN)
def test_prompts_and_decoded_tokens_run_on_blackwell(on_blackwell, case):
    check_passes(on_blackwell[case], case, 16384, "b200")  # SGLang's chunk for a GPU with so much memory


@pytest.mark.long
def test_attention_multiplies_as_much_on_blackwell_as_on_hopper(ranks, on_blackwell):
    """Triton's attention, FlashAttention 3, and FlashInfer's kernels, which are counted by functions of their own."""
    for case in ("dense", "latent", *CACHES):
        here, there = (found[case]["forward"]["phases"] for found in (ranks, on_blackwell))
        assert 2 * here[0]["flops"]["bf16"] == there[0]["flops"]["bf16"], "twice as many prompts"
        assert case == "latent" or here[2]["flops"]["bf16"] == there[2]["flops"]["bf16"], "each decoded token attends to its whole context"


@pytest.mark.long
def test_flashinfer_multiplies_as_much_as_triton(on_blackwell):
    """The case with FlashInfer has twice as many layers, and both have a product with the vocabulary."""
    (plain, plain_eager), (cache, eager) = (
        [on_blackwell[case]["forward"]["phases"][place] for place in (0, 2)] for case in ("dense", "cache")
    )
    head = 2 * 16 * 1024 * 8192 // 2
    assert 2 * (plain["flops"]["bf16"] - head) == cache["flops"]["bf16"] - head
    assert 2 * (plain_eager["flops"]["bf16"] - head) == eager["flops"]["bf16"] - head


@pytest.mark.long
def test_engines_on_blackwell_hold_what_a_sync_fills(on_blackwell):
    """Weights keep their bytes and FP32 scales, every other tensor is known, and all layers quantize by the contract."""
    for case in ("dense", "experts", "bf16", "latent", "delta"):
        rank = on_blackwell[case]
        dtypes = {dtype for name, (dtype, _) in rank["tensors"].items() if name.endswith("weight_scale_inv")}
        assert dtypes == (set() if case == "bf16" else {"float32"}) and rank["chunks"]
        assert set(rank["activation_formats"].values()) <= {"fp8 pow2"}
