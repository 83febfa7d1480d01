"""Adapters alone train: their gradients, what is frozen, and that tensor-parallel ranks compute and learn what one process does."""

from __future__ import annotations

import pytest
import torch
from support import lora, transformers_reference
from support.models import FP8, FP32, random_sequences

LORA = {"rank": 8, "alpha": 16.0}


@pytest.fixture(scope="module", params=["fp32", "fp8"])
def runs(request, worlds, checkpoint):
    """Results of one process, and of the ranks of two, for the same checkpoint and batches."""
    precision = {"fp32": FP32, "fp8": FP8}[request.param]
    batches = [random_sequences(8, seed) for seed in range(3)]
    return request.param, *(worlds(ranks).call(lora.train_adapters, checkpoint, precision, LORA, batches) for ranks in (1, 2))


def test_adapters_begin_at_zero_and_alone_are_stepped(runs):
    _, (alone,), together = runs
    expected = {f"decoder.layers.{layer}.{part}.{each}" for layer in (0, 1) for part in PARTS for each in ("lora_A", "lora_B")}
    for result in (alone, *together):
        assert torch.equal(result["start"], result["frozen"]) and torch.equal(result["frozen"], result["frozen again"])
        assert result["stepped"] == result["gradients"] == result["changed"] == expected
        assert result["masters"] == [], "a frozen weight needs no FP32 copy"
        assert (result["trained"] - result["start"]).abs().max() > 0.1


PARTS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def test_tensor_parallel_ranks_have_the_bits_of_one_process_and_learn_alike(runs):
    name, (alone,), (first, second) = runs
    assert torch.equal(alone["start"], first["start"]) and torch.equal(first["trained"], second["trained"])
    tolerance = {"fp32": 1e-3, "fp8": 5e-2}[name]
    moved = (alone["trained"] - alone["start"]).norm()
    assert (alone["trained"] - first["trained"]).norm() < tolerance * moved
    for one, two in zip(alone["steps"], first["steps"], strict=True):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=tolerance)
    for each, whole in alone["adapters"].items():
        parts = [first["adapters"][each], second["adapters"][each]]
        if parts[0].shape == whole.shape:
            assert torch.equal(*parts), f"{each}: the ranks' copies differ"


def test_gradient_is_the_slope_of_the_loss(worlds, checkpoint):
    ((square, slope),) = worlds(1).call(lora.measure_adapter_gradient, checkpoint, FP32, LORA, random_sequences(4, 1))
    assert square > 1e-6 and slope == pytest.approx(square, rel=0.02)


def test_peft_loads_what_is_exported_and_computes_the_trainers_logprobs(worlds, transformers_process, checkpoint, tmp_path):
    batch, run, adapters = random_sequences(8, 0), tmp_path / "step_00001", tmp_path / "adapters"
    ((result),) = worlds(1).call(lora.train_adapters, checkpoint, FP32, LORA, [batch], None, run)
    worlds(1).call(lora.export, run, adapters)
    samples = [(sample.prompt_ids.tolist(), sample.response_ids.tolist()) for sample in batch]
    ((plain, adapted),) = transformers_process.call(transformers_reference.peft_logprobs, checkpoint, adapters, samples)
    assert (result["trained"] - result["start"]).abs().max() > 0.1
    torch.testing.assert_close(plain, result["start"], rtol=0, atol=1e-4)
    torch.testing.assert_close(adapted, result["trained"], rtol=0, atol=1e-4)
