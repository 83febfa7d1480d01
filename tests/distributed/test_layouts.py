"""Replicas, pipeline stages and both together compute what one process computes, also where they cannot share the work evenly."""

from __future__ import annotations

import pytest
import torch
from support import trainer
from support.models import ARCHITECTURES, FP8, FP32, make_checkpoint, make_model, random_sequences, read_weights
from support.processes import World

from megatron_rl.errors import RunError
from parallel.layout import Layout

LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "tp2_pp2": Layout(tp=2, pp=2),
    "tp2_dp2": Layout(tp=2, dp=2),
    "pp2_dp2": Layout(pp=2, dp=2),
    "ep2": Layout(dp=2, ep=2),
    "ep2_dp4": Layout(dp=4, ep=2),
    "ep2_pp2": Layout(dp=2, ep=2, pp=2),
    "tp2_ep2_etp1": Layout(tp=2, dp=2, ep=2, etp=1),
    "tp2_ep2_etp2": Layout(tp=2, dp=2, ep=2, etp=2),
    "cp2": Layout(cp=2),
    "cp2_dp2": Layout(cp=2, dp=2),
    "tp2_cp2": Layout(tp=2, cp=2),
    "cp2_ep2": Layout(cp=2, dp=2, ep=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "pp2_vpp2_dp2": Layout(pp=2, vpp=2, dp=2),
    "pp2_vpp2_ep2": Layout(pp=2, vpp=2, dp=2, ep=2),
    "tp2_pp2_vpp2_dp2": Layout(tp=2, pp=2, vpp=2, dp=2),
    "pp2_vpp2_cp2_dp2": Layout(pp=2, vpp=2, cp=2, dp=2),
    "tp2_pp2_vpp2_cp2": Layout(tp=2, pp=2, vpp=2, cp=2),
    "tp2_ep2_etp1_cp2_dp2": Layout(tp=2, cp=2, dp=2, ep=2, etp=1),
}

TRAIN = {"micro_batch_tokens": 60, "adam_eps": 1e-4}
"""Adam's epsilon is far above rounding noise, so that the sign of a gradient that is almost zero is not a whole step."""

TOLERANCE = {"fp32": 1e-5, "fp8": 5e-2}
"""Relative. Sums in another order differ by 1e-6. In FP8 such a difference of the first step's gradient moves a few weights to the next
E4M3 number, 2^-3 of themselves away, and the second step then goes another way: its loss and its log-probs differ by 3 %."""


def batches() -> list:
    """Within 60 tokens one process packs 7 sequences as 2 + 2 + 3; two replicas as 2 and 1, 2 and 2, 5 sequences as 1 and 1, 1 and 2."""
    return [random_sequences(7, seed=1), random_sequences(5, seed=2)]


def learnt(found: dict) -> list[dict[str, float]]:
    """A run's steps without the padding, which is the layout's: a row's for sequence parallelism, an idle replica's own."""
    return [{name: value for name, value in step.items() if name != "tokens/padding"} for step in found["steps"]]


@pytest.fixture(scope="module")
def untied(checkpoint):
    return checkpoint


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tied2"), num_hidden_layers=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Four layers, four heads on two key-value heads."""
    return make_model(tmp_path_factory.mktemp("qwen3"), ARCHITECTURES["qwen3"])


@pytest.fixture(scope="module")
def deep_moe(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("deep_moe"), ARCHITECTURES["qwen3_moe"])


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    with World(8, tmp_path_factory.mktemp("world8")) as world:
        yield world


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3_moe"), {**ARCHITECTURES["qwen3_moe"], "num_hidden_layers": 2, "mlp_only_layers": [0]})


@pytest.fixture(scope="module")
def deepseek_v3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("deepseek_v3"), {**ARCHITECTURES["deepseek_v3"], "num_hidden_layers": 2})


@pytest.fixture(scope="module")
def alone(one):
    """(checkpoint, precision) -> what one process finds, computed once."""
    known: dict = {}

    def find(folder, precision):
        key = folder, precision["mode"]
        if key not in known:
            known[key] = one.call(trainer.train_grpo, folder, precision, TRAIN, batches())[0]
        return known[key]

    return find


@pytest.mark.parametrize(
    "layout, model, precision",
    [
        *((name, "untied", "fp32") for name in ("tp2", "pp2", "dp2", "tp2_pp2", "tp2_dp2", "pp2_dp2")),
        ("pp2", "tied", "fp32"),
        ("pp2_dp2", "tied", "fp32"),
        ("dp2", "untied", "fp8"),
        ("pp2", "untied", "fp8"),
        ("pp2_dp2", "tied", "fp8"),
        *((name, "qwen3_moe", "fp32") for name in ("tp2", "dp2", "ep2", "ep2_dp4", "ep2_pp2", "tp2_ep2_etp1", "tp2_ep2_etp2")),
        *((name, "deepseek_v3", "fp32") for name in ("tp2", "ep2_pp2", "tp2_ep2_etp1")),
        ("ep2", "qwen3_moe", "fp8"),
        *(("cp2", model, "fp32") for model in ("untied", "qwen3_moe", "deepseek_v3")),
        ("pp2_vpp2", "deep", "fp32"),
        *((name, "deep", "fp8") for name in ("pp2_vpp2_dp2", "cp2_dp2", "tp2_cp2")),
        ("cp2_ep2", "qwen3_moe", "fp32"),
        ("pp2_vpp2_ep2", "deep_moe", "fp32"),
        *((name, "deep", "fp32") for name in ("tp2_pp2_vpp2_dp2", "tp2_pp2_vpp2_cp2")),
        ("pp2_vpp2_cp2_dp2", "deep", "fp8"),
        ("tp2_ep2_etp1_cp2_dp2", "deep_moe", "fp32"),
    ],
)
def test_training_equals_that_of_one_process(request, alone, layout, model, precision):
    folder, tolerance = request.getfixturevalue(model), TOLERANCE[precision]
    how = {"fp32": FP32, "fp8": FP8}[precision]
    expected = alone(folder, how)
    world = request.getfixturevalue({2: "two", 4: "four", 8: "eight"}[LAYOUTS[layout].world_size])
    found, *others = world.call(trainer.train_grpo, folder, how, TRAIN, batches(), LAYOUTS[layout])
    for other in others:
        assert torch.equal(other["before"], found["before"]) and other["steps"] == found["steps"]  # every rank is told the same
    if precision == "fp8" and LAYOUTS[layout].tp == LAYOUTS[layout].ep == 1:
        assert torch.equal(found["before"], expected["before"])
    assert_same_training(folder, expected, found, tolerance)


def test_without_what_is_on_unless_turned_off(four, alone, untied):
    """No sequence parallelism, no distributed optimizer, no activation kept."""
    how = {"layout": {"sequence_parallel": False}, "distributed_optimizer": False, "recompute": "full"}
    found = four.call(trainer.train_grpo, untied, FP32, {**TRAIN, **how}, batches(), LAYOUTS["tp2_dp2"])[0]
    assert_same_training(untied, alone(untied, FP32), found, TOLERANCE["fp32"])


def assert_same_training(folder, expected: dict, found: dict, tolerance: float) -> None:
    spread = expected["before"].std()
    assert spread > 0.1  # the batch tells policies apart
    assert (found["before"] - expected["before"]).abs().max() < tolerance * spread
    assert found["entropy"] == pytest.approx(expected["entropy"], rel=tolerance)
    for number, (mine, theirs) in enumerate(zip(learnt(found), learnt(expected), strict=True)):
        assert {"grad_norm", "loss/total", "loss/policy", "loss/kl", "clip/positive"} <= theirs.keys()
        exact = TOLERANCE["fp32"] if number == 0 else tolerance  # the first step's gradient, in FP8 as well
        assert mine == pytest.approx(theirs, rel=exact, abs=exact)
    start = read_weights(folder)
    assert found["masters"].keys() == expected["masters"].keys() == start.keys()
    for name, weight in expected["masters"].items():
        way = weight - start[name]
        assert way.abs().max() > 1e-3 or name.endswith("e_score_correction_bias"), f"{name} was not trained"
        assert (weight - found["masters"][name]).norm() <= 3 * tolerance * way.norm(), f"{name}: the ranks took another path"
    assert (found["after"] - expected["after"]).abs().mean() < tolerance * (expected["after"] - expected["before"]).abs().mean()


@pytest.mark.parametrize("layout, model", [("dp2", "untied"), ("ep2", "qwen3_moe")])
def test_one_sequence_for_two_replicas(request, one, two, layout, model):
    folder, batch = request.getfixturevalue(model), [random_sequences(1, seed=4)]
    expected = one.call(trainer.train_grpo, folder, FP32, TRAIN, batch)[0]
    found = two.call(trainer.train_grpo, folder, FP32, TRAIN, batch, LAYOUTS[layout])[1]
    assert learnt(found)[0] == pytest.approx(learnt(expected)[0], rel=1e-5)
    assert found["steps"][0]["tokens/padding"] > expected["steps"][0]["tokens/padding"] == 0
    assert torch.allclose(found["after"], expected["after"], atol=1e-5)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_broken_numbers_are_told_on_every_rank_and_change_no_byte(two, checkpoint, layout):
    for how, line in (("loss", "the loss of optimizer step 2 is nan"), ("gradient", "holds inf or NaN in optimizer step 2")):
        args = checkpoint, FP8, random_sequences(4, seed=3), how, LAYOUTS[layout]
        for raised, changed in two.call(trainer.poison_loss, *args):
            assert line in raised
            assert changed == []


def test_a_nan_in_a_weight_of_one_stage_is_named_on_every_rank(two, checkpoint):
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    with pytest.raises(RunError, match=f"{name}: weight holds inf or NaN"):
        two.call(trainer.poison_weight, checkpoint, FP8, name, LAYOUTS["pp2"])


@pytest.mark.parametrize("layout, model", [("pp2_dp2", "untied"), ("pp2_dp2", "tied"), ("ep2_pp2", "qwen3_moe")])
def test_a_checkpoint_of_stages_and_replicas_is_the_same_model_in_one_process(request, one, four, tmp_path, layout, model):
    folder = tmp_path / "step_00001"
    args = request.getfixturevalue(model), FP8, random_sequences(4, seed=1), folder, LAYOUTS[layout]
    held = four.call(trainer.save_checkpoint, *args)[0]
    loaded = one.call(trainer.load_checkpoint_alone, folder)[0]
    for part, tensors in held.items():
        assert loaded[part].keys() == tensors.keys()
        assert [name for name in tensors if not torch.equal(loaded[part][name], tensors[name])] == [], part
