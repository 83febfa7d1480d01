"""The engine serves models with gated delta nets: the right function, and bits that depend neither on the batch nor on where a prompt is
cut."""

import shutil

import numpy as np
import pytest
import torch
from support import hybrids

PROMPTS = [[7 * token % 250 for token in range(length)] for length in (1, 3, 31, 40, 64, 90, 130)]
PRECISIONS = {
    "fp32": {"mode": "bf16", "high": "fp32"},
    "bf16": {"mode": "bf16", "high": "bf16"},
    "bf16_kv": {"mode": "bf16", "high": "bf16", "kv": "e4m3"},
}
ODD_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "num_hidden_layers": 5}
ANY_ORDER = {"num_hidden_layers": 5, "layer_types": [f"{kind}_attention" for kind in ("full", "linear", "linear", "full", "linear")]}


@pytest.mark.parametrize(
    "name, precision, engine, changes",
    [
        pytest.param("qwen3_next", "fp32", {}, {}, marks=pytest.mark.long),
        pytest.param("qwen3_5", "fp32", {}, ODD_HEADS, marks=pytest.mark.long),
        pytest.param("qwen3_5", "bf16", {"tp": 2}, {}, marks=pytest.mark.long),
        pytest.param("qwen3_5_moe", "fp32", {"tp": 2, "ep": 2}, {}, marks=pytest.mark.long),
        pytest.param("qwen3_next", "fp32", {}, ODD_HEADS, marks=pytest.mark.long),
        pytest.param("qwen3_next", "fp32", {"tp": 2}, ANY_ORDER, marks=pytest.mark.long),
        pytest.param("qwen3_5", "fp32", {}, ANY_ORDER | {"layer_types": ANY_ORDER["layer_types"][::-1]}, marks=pytest.mark.long),
        pytest.param("qwen3_next", "bf16_kv", {"tp": 4}, {}, marks=pytest.mark.long),
    ],
)
def test_a_hybrid_is_served_exactly(name, precision, engine, changes, tmp_path):
    settings = PRECISIONS[precision]
    folder = hybrids.make_hybrid(tmp_path / "model", name, torch.bfloat16 if settings["high"] == "bf16" else torch.float32, **changes)
    with hybrids.serve(folder, tmp_path / "engine", settings, engine) as served:
        together = hybrids.generate(served, PROMPTS)
        again = hybrids.generate(served, PROMPTS, cached=True)
        assert sum(each.cached_tokens for each in again) > 200  # states of prefixes were used
        alone = [hybrids.generate(served, [prompt], seeds=[seed])[0] for seed, prompt in enumerate(PROMPTS)]
        # what was decoded, as a part of the prompt
        longer = [[*prompt, *each.output_ids_T[:5].tolist()] for prompt, each in zip(PROMPTS, together, strict=True)]
        rest = hybrids.generate(served, longer, tokens=7)
    for each, *others in zip(together, again, alone, strict=True):
        for other in others:
            assert np.array_equal(each.output_ids_T, other.output_ids_T) and np.array_equal(each.logprobs_T, other.logprobs_T)
    for each, other in zip(together, rest, strict=True):
        assert np.array_equal(each.output_ids_T[5:], other.output_ids_T) and np.array_equal(each.logprobs_T[5:], other.logprobs_T)
    if precision == "fp32":
        for prompt, each in zip(PROMPTS, together, strict=True):
            reference = hybrids.compute_reference(folder, prompt, each.output_ids_T.tolist())
            torch.testing.assert_close(torch.tensor(each.logprobs_T), reference, atol=1e-4, rtol=0)


@pytest.mark.long
def test_the_decoder_of_a_checkpoint_for_text_and_images_is_served(tmp_path):
    folder = hybrids.make_hybrid(tmp_path / "model", "qwen3_5_moe")
    shutil.copytree(folder, tmp_path / "whole")
    hybrids.rename_as_wrapper(tmp_path / "whole")
    with hybrids.serve(tmp_path / "whole", tmp_path / "engine", PRECISIONS["fp32"]) as served:
        for prompt, each in zip(PROMPTS[:5], hybrids.generate(served, PROMPTS[:5]), strict=True):
            reference = hybrids.compute_reference(folder, prompt, each.output_ids_T.tolist())
            torch.testing.assert_close(torch.tensor(each.logprobs_T), reference, atol=1e-4, rtol=0)
