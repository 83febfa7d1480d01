"""Every architecture the trainer builds computes what Hugging Face transformers computes from the same checkpoint."""

from __future__ import annotations

import pytest
import torch
from support import trainer, transformers_reference
from support.models import ARCHITECTURES, FP8, FP32, make_model, random_sequences


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name != "qwen3"])
def model(request, tmp_path_factory):
    """A random checkpoint; qwen3 itself is in test_tensor_parallel.py."""
    return make_model(tmp_path_factory.mktemp(request.param), ARCHITECTURES[request.param])


def test_logits_equal_transformers(model, one, two, plain):
    ids = torch.randint(0, 384, (3, 40), generator=torch.Generator().manual_seed(5)).tolist()
    expected = plain.call(transformers_reference.logits, model, ids)[0]
    assert expected.std() > 0.1
    for world in (one, two):
        parts = world.call(trainer.logits, model, FP32, ids)
        difference = (torch.cat(parts, dim=-1) - expected).abs().max()
        assert difference < 1e-5 * expected.abs().max(), f"{len(parts)} ranks: {difference}"


def test_training_in_bf16_with_fp8_layers_lowers_the_loss(model, one):
    precision = {"mode": "fp8_unified", "high": "bf16"}
    learnt = one.call(trainer.learn_text, model, precision, {"learning_rate": 2e-3}, random_sequences(4, seed=7), 4)[0]
    assert learnt["losses"][-1] < 0.8 * learnt["losses"][0]
    assert {learnt["dtypes"][name] for name in learnt["fp8"]} == {"torch.float32"}
    assert {learnt["dtypes"][name] for name in learnt["dtypes"].keys() - set(learnt["fp8"])} == {"torch.bfloat16"}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_run_checkpoint_of_two_ranks_loads_into_one(name, one, two, tmp_path):
    start = make_model(tmp_path / "start", ARCHITECTURES[name])
    # sequence parallelism, which experts need, cuts the batch's width: it is even here
    seed = next(seed for seed in range(99) if max(sequence.length for sequence in random_sequences(4, seed)) % 2)
    held = two.call(trainer.save_checkpoint, start, FP8, random_sequences(4, seed), tmp_path / "step_00001")[0]
    loaded = one.call(trainer.load_checkpoint_alone, tmp_path / "step_00001")[0]
    for part, tensors in held.items():
        assert loaded[part].keys() == tensors.keys()
        assert [name for name in tensors if not torch.equal(loaded[part][name], tensors[name])] == [], part
