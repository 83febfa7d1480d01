"""Two micro-batches that take turns have the bits of one after the other: log-probs, steps, weights."""

from __future__ import annotations

import pytest
import torch
from support import trainer
from support.models import FP8, FP32, random_sequences

from parallel.layout import Layout

BF16 = {"mode": "bf16", "high": "bf16"}
FAST = FP8 | {"reduction": "fast"}
TRAIN = {"micro_batch_tokens": 40, "adam_eps": 1e-4}
CASES = [
    (Layout(tp=2), "qwen3", FP8),
    (Layout(tp=2), "qwen2", FAST),
    (Layout(tp=2, pp=2), "qwen3", FP8),
    (Layout(dp=2, ep=2), "qwen3_moe", FP8),
    (Layout(tp=2, dp=2, ep=4, etp=1), "qwen3_moe", FAST),
    (Layout(tp=2, dp=2, ep=2, etp=1), "deepseek_v3", FP8),
    (Layout(dp=2, ep=2), "glm4_moe", BF16),
]
LONG = [
    (Layout(pp=2, vpp=2), "qwen3", FP8),
    (Layout(tp=2, cp=2), "qwen3", FP32),
    (Layout(tp=2), "glm4", FP8),
    (Layout(tp=2), "llama", BF16),
]


@pytest.mark.parametrize("layout, model, precision", [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_turns_change_no_bit(worlds, model_folder, layout, model, precision):
    folder = model_folder(model, num_hidden_layers=4 if layout.vpp > 1 else 2, tie_word_embeddings=False)
    samples = [random_sequences(7, seed=1), random_sequences(6, seed=2)]
    in_turns, after_another = (
        worlds(layout.world_size).call(trainer.train_grpo, folder, precision, {**TRAIN, "two_batch_overlap": mode}, samples, layout)
        for mode in ("all", "off")
    )
    for ours, theirs in zip(in_turns, after_another, strict=True):
        for name in ("before", "after"):
            assert torch.equal(ours[name], theirs[name]), name
        for step, expected in zip(ours["steps"], theirs["steps"], strict=True):
            different = {name: (value, expected[name]) for name, value in step.items() if value != expected[name]}
            assert not different.keys() - {"tokens/padding"}, different  # virtual stages take rounds of twice as many micro-batches
        for name, weight in theirs["masters"].items():
            assert torch.equal(ours["masters"][name], weight), name
