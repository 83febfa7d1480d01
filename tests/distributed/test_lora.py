"""Training of adapters alone: their gradients, frozen weights, and the same results in any layout."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from support import lora, transformers_reference
from support.families import ARCHITECTURES
from support.fp8_checkpoints import add_mtp_layer
from support.models import FP8, FP32, make_model, random_sequences

from parallel.layout import Layout

LORA = {"rank": 8, "alpha": 16.0}


@pytest.fixture(scope="module", params=["fp32", "fp8"])
def runs(request, worlds, checkpoint):
    """Results of one process, and of two ranks, for the same checkpoint and batches."""
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


ATTENTION, FC = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
FAST = {"reduction": "fast"}
CASES: dict[str, tuple[str, Layout, dict[str, str]]] = {
    "ep": ("qwen3_moe", Layout(dp=2, ep=2), {}),
    "ep, not etp": ("qwen3_moe", Layout(tp=2, ep=2, etp=1), {}),
    "etp": ("qwen3_moe", Layout(tp=2, etp=2), {}),
    "replicas of experts": ("qwen3_moe", Layout(tp=2, etp=1), {}),
    "pp": ("qwen3_moe", Layout(pp=2, vpp=2), {}),
    "cp": ("qwen3_moe", Layout(cp=2), {}),
    "latent attention": ("deepseek_v3", Layout(tp=2, ep=2, etp=1), {}),
    "norms behind layers": ("glm4", Layout(tp=2), {}),
    "sums of rounded parts": ("qwen3_moe", Layout(tp=2, etp=2), FAST),
    "pp, cp and ep": ("qwen3_moe", Layout(pp=2, cp=2, ep=2), {}),
}
_LONG = ("replicas of experts", "pp, cp and ep")


def targets(model: str) -> dict[str, object]:
    return LORA | {"targets": ATTENTION[model == "deepseek_v3" :] + FC}


@pytest.fixture(scope="module")
def alone(worlds, model_folder):
    """`alone(model)`: its folder, batches, and the results of one process."""

    @functools.cache
    def train(model: str) -> tuple[Path, list, dict]:
        folder, batches = model_folder(model), [random_sequences(4, 1), random_sequences(6, 2)]
        return folder, batches, worlds(1).call(lora.train_adapters, folder, FP32, targets(model), batches, Layout())[0]

    return train


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in _LONG)) for case in CASES])
def test_every_layout_learns_what_one_process_does_which_has_the_bits_of_its_checkpoint(worlds, alone, tmp_path, case):
    model, layout, changes = CASES[case]
    folder, batches, one = alone(model)
    precision, exact = FP32 | changes, not changes
    first, *others = worlds(layout.world_size).call(
        lora.train_adapters, folder, precision, targets(model), batches, layout, run := tmp_path / "run"
    )
    assert torch.equal(one["start"], first["start"]) is exact
    assert one["stepped"] == set().union(*(each["changed"] for each in (first, *others)))
    assert (one["trained"] - first["trained"]).norm() < 1e-3 * (one["trained"] - one["start"]).norm()
    for step, same in zip(one["steps"], first["steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4)
    (again,) = worlds(1).call(lora.score_checkpoint, folder, precision, targets(model), batches[0], Layout(), run)
    torch.testing.assert_close(first["trained"], again, rtol=0, atol=0 if exact else 1e-4)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_layers_that_are_recomputed_learn_the_same(worlds, model_folder, recompute):
    """With adapters on MLPs only, the input of the first layer needs no gradient."""
    run = model_folder("qwen3_moe"), FP32, LORA | {"targets": FC}, [random_sequences(4, 1), random_sequences(4, 2)], Layout(), None
    kept, again = (worlds(1).call(lora.train_adapters, *run, {"recompute": how})[0] for how in ("none", recompute))
    assert kept["gradients"] == again["changed"] and torch.equal(kept["trained"], again["trained"])


PEFT = {
    "dense": ("qwen3", {"num_hidden_layers": 2}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 2, "mlp_only_layers": []}),
    "one tensor of gate and up": ("glm4", {"num_hidden_layers": 2}),
}


@pytest.mark.parametrize("kind", PEFT)
def test_peft_loads_what_is_exported_and_computes_the_trainers_logprobs(worlds, transformers_process, model_folder, tmp_path, kind):
    """transformers has one tensor of all experts, into which PEFT loads their adapters."""
    model, changes = PEFT[kind]
    folder, batch, run, adapters = model_folder(model, **changes), random_sequences(8, 0), tmp_path / "step_00001", tmp_path / "adapters"
    ((result),) = worlds(1).call(lora.train_adapters, folder, FP32, targets(model), [batch], Layout(), run)
    worlds(1).call(lora.export, run, adapters)
    samples = [(sample.prompt_ids.tolist(), sample.response_ids.tolist()) for sample in batch]
    ((plain, adapted),) = transformers_process.call(transformers_reference.peft_logprobs, folder, adapters, samples)
    assert (result["trained"] - result["start"]).abs().max() > 0.1
    torch.testing.assert_close(plain, result["start"], rtol=0, atol=1e-4)
    torch.testing.assert_close(adapted, result["trained"], rtol=0, atol=1e-4)


def test_layers_for_multi_token_prediction_stay_with_the_base(worlds, tmp_path):
    folder, run = make_model(tmp_path / "model", ARCHITECTURES["deepseek_v3"]), tmp_path / "step_00001"
    add_mtp_layer(folder)
    worlds(1).call(lora.train_adapters, folder, FP32, targets("deepseek_v3"), [random_sequences(2, 0)], Layout(), run)
    assert (run / "state.json").is_file() and not (run / "mtp").exists()
