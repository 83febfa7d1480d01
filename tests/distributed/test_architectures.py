"""Every architecture of the trainer computes what Hugging Face transformers computes from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import trainer, transformers_reference
from support.families import ARCHITECTURES
from support.models import FP32, random_sequences

BF16 = {"mode": "fp8_unified", "high": "bf16"}

TRAINED = ("qwen2", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module", params=[*ARCHITECTURES, "tied"])
def folder(request, model_folder, tied_checkpoint):
    return tied_checkpoint if request.param == "tied" else model_folder(request.param)


def test_logits_equal_transformers(folder, worlds, transformers_process):
    ids = torch.randint(0, 384, (3, 40), generator=torch.Generator().manual_seed(5)).tolist()
    expected = transformers_process.call(transformers_reference.logits, folder, ids)[0]
    assert expected.std() > 0.1
    for size in (1, 2):
        parts = worlds(size).call(trainer.logits, folder, FP32, ids)
        difference = (torch.cat(parts, dim=-1) - expected).abs().max()
        assert difference < 1e-5 * expected.abs().max(), f"{size} ranks: {difference}"


def test_logprobs_of_a_text_equal_transformers(folder, worlds, transformers_process):
    """FP32 differs only by the order of sums. BF16 is at most 1.5 times as far from FP32 as transformers' BF16 is."""
    text = (Path(trainer.__file__).parent / "held_out.txt").read_bytes()
    documents = [list(text[start : start + 90]) for start in range(0, len(text), 90)]  # the byte tokenizer's ids
    reference, rounded = (
        transformers_process.call(transformers_reference.text_logprobs, folder, documents, high)[0] for high in ("fp32", "bf16")
    )
    ours, ours_rounded = (worlds(1).call(trainer.text_logprobs, folder, {**FP32, "high": high}, documents)[0] for high in ("fp32", "bf16"))
    assert len(reference) == len(text) - len(documents) > 500 and reference.std() > 0.3
    assert (ours - reference).abs().max() < 2e-5
    assert (ours_rounded - reference).abs().mean() < 1.5 * (rounded - reference).abs().mean()


@pytest.mark.parametrize(
    "folder", [name if name in TRAINED else pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES], indirect=True
)
def test_training_in_bf16_with_fp8_layers_lowers_the_loss_and_keeps_fp32_masters(folder, worlds):
    steps = worlds(1).call(trainer.learn_text, folder, BF16, {"learning_rate": 2e-3}, random_sequences(4, seed=7), 4)[0]
    assert steps["losses"][-1] < 0.8 * steps["losses"][0]
    assert {steps["dtypes"][name] for name in steps["fp8"]} == {"torch.float8_e4m3fn"} and steps["masters"] == {"torch.float32"}
    assert {steps["dtypes"][name] for name in steps["dtypes"].keys() - set(steps["fp8"])} == {"torch.bfloat16"}


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_too_small_for_bf16_moves_the_fp32_masters(worlds, checkpoint, size):
    step = worlds(size).call(trainer.learn_text, checkpoint, BF16, {"learning_rate": 1e-7}, random_sequences(8, seed=7), 1)[0]
    assert len(step["fp8"]) == 2 * 4
    for name in step["fp8"]:  # one step of Adam is at most the learning rate; bf16 would lose it in a weight of 0.05
        assert 0.5e-7 < step["moved"][name] < 2e-7, name
