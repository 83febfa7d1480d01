"""Hooks on products and attention of an engine whose kernels the trainer shares, against the calls and signatures of the pinned SGLang."""

from types import SimpleNamespace

import pytest
import torch
from support import fake_gpu_libraries
from support.kernel_tests import random
from support.sglang_signatures import list_calls, read_function

from megatron_rl.errors import RunError
from megatron_rl.kernels import plain
from rollout_sglang.hooks import rank_kernels

BACKEND = "srt/layers/attention/flashattention_backend"
ORDINARY = {"causal": True, "window_size": (-1, -1), "softcap": 0.0, "num_splits": 1, "ver": 3, "max_seqlen_q": 1}


def attend(width=128, dtype=torch.bfloat16, **changes):
    """Return the arguments that reach SGLang's function."""
    bind = read_function("kernels/ops/attention/flash_attention", "flash_attn_with_kvcache")
    q, cache = (torch.zeros(3, 2, width, dtype=dtype) for _ in range(2))
    return rank_kernels.attend(bind, q=q, k_cache=cache, v_cache=cache, **{**ORDINARY, **changes})


def test_each_call_of_sglang_has_what_decides_the_order():
    calls = list_calls(BACKEND, "flash_attn_with_kvcache")
    ordinary = [call for call in calls if call["causal"] != "False" and "qv" not in call]  # without trees of drafts and latents
    assert len(ordinary) >= 3 and all({"q", "k_cache", "v_cache", *ORDINARY} <= {*call} for call in ordinary)
    assert all("self.num_splits" in call["num_splits"] for call in calls), "what `start_attention` does not set"


def test_a_decoded_token_and_a_prompt_take_the_same_blocks():
    assert attend()["max_seqlen_q"] == 2 and attend(max_seqlen_q=77, scheduler_metadata=None, sinks=None)["max_seqlen_q"] == 77
    given = attend(softmax_scale=0.5, return_softmax_lse=True)
    assert given["softmax_scale"] == 0.5 and given["return_softmax_lse"] and given["num_splits"] == 1 and given["causal"]


@pytest.mark.parametrize(
    "change",
    [
        {"num_splits": 0},
        {"scheduler_metadata": torch.zeros(1)},
        {"causal": False},
        {"window_size": (127, 0)},
        {"softcap": 30.0},
        {"sinks": 1},
        {"ver": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_order_of_attention_is_refused(change):
    with pytest.raises(NotImplementedError, match="precision.reduction"):
        attend(**change)


@pytest.mark.parametrize("width, dtype", [(64, torch.bfloat16), (256, torch.bfloat16), (128, torch.float8_e4m3fn)])
def test_other_heads_and_caches_are_refused(width, dtype):
    with pytest.raises(RunError, match=f"heads of {width}"):
        attend(width, dtype)


@pytest.fixture
def shared(monkeypatch):
    fake_gpu_libraries.install(monkeypatch)
    monkeypatch.setattr(plain, "takes", lambda x, weight: x.dtype == weight.dtype == torch.bfloat16)


def test_biases_are_added_to_rounded_products(shared):
    x, weight, bias = (random(*shape, seed=len(shape), dtype=torch.bfloat16) for shape in ((5, 64), (16, 64), (16,)))
    layer = SimpleNamespace(weight=weight)
    wanted = (x.float() @ weight.float().t()).bfloat16()
    assert torch.equal(rank_kernels.apply_plain_linear(None, layer, x), wanted)
    assert torch.equal(rank_kernels.apply_plain_linear(None, layer, x, bias), wanted + bias)
    with pytest.raises(NotImplementedError, match="float32"):
        rank_kernels.apply_plain_linear(None, layer, x.float())
    plain_head = SimpleNamespace(use_fp32_lm_head=False, use_fp32_lm_head_output=False)
    assert torch.equal(rank_kernels.compute_lm_head(plain_head, x, layer, out=None), wanted)
    for processor, head in ((SimpleNamespace(use_fp32_lm_head=True), layer), (plain_head, SimpleNamespace(weight=weight, set_lora=1))):
        with pytest.raises(NotImplementedError, match="output layer"):
            rank_kernels.compute_lm_head(processor, x, head)


def test_another_fp8_product_is_refused():
    def deepgemm_w8a8_block_fp8_linear_with_fallback(): ...

    assert deepgemm_w8a8_block_fp8_linear_with_fallback.__name__ == rank_kernels.FP8_FUNCTION
    assert rank_kernels.require_deep_gemm(lambda *_: deepgemm_w8a8_block_fp8_linear_with_fallback, [128, 128], False)
    with pytest.raises(RuntimeError, match="needs DeepGEMM"):
        rank_kernels.require_deep_gemm(lambda *_: attend, [128, 128], False)
    with pytest.raises(NotImplementedError, match=r"\[96, 128\]"):
        rank_kernels.refuse_fallback(torch.zeros(1, 128), torch.zeros(96, 128))
    called = read_function("srt/layers/quantization/fp8_utils", "triton_w8a8_block_fp8_linear")
    assert [*called(1, 2, 3, 4)][:2] == ["input", "weight"]
