"""Experts: routing that is recorded, replayed and balanced is the same in every layout."""

from __future__ import annotations

import pytest
import torch
from support import routing
from support.models import random_sequences, read_weights

from parallel.layout import Layout

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2_etp1": Layout(tp=2, etp=1),
    "ep2": Layout(dp=2, ep=2),
    "ep4": Layout(dp=4, ep=4),
    "ep2_pp2": Layout(dp=2, ep=2, pp=2),
    "tp2_ep2_etp1": Layout(tp=2, dp=2, ep=2, etp=1),
    "tp2_ep2_etp2": Layout(tp=2, dp=2, ep=2, etp=2),
}
BATCH = random_sequences(7, seed=1)


@pytest.fixture(scope="module")
def folders(model_folder):
    layers = {"num_hidden_layers": 2}
    return {
        "qwen3_moe": model_folder("qwen3_moe", **layers, mlp_only_layers=[]),
        "deepseek_v3": model_folder("deepseek_v3", **layers),
    }


ROUTED = {"qwen3_moe": routing.with_random_routing(BATCH, 4, 2), "deepseek_v3": routing.with_random_routing(BATCH, 8, 4)}


@pytest.fixture(scope="module")
def alone(worlds, folders):
    return {name: worlds(1).call(routing.scores, folder, ROUTED[name], None)[0] for name, folder in folders.items()}


@pytest.mark.parametrize("name", ROUTED)
def test_replay_takes_the_recorded_experts_and_nothing_else_changes(worlds, folders, alone, name):
    scores, layers = alone[name], slice(0 if name == "qwen3_moe" else 1, 2)
    for sequence, record in zip(ROUTED[name], scores["records"], strict=True):
        assert torch.equal(record[:, layers], sequence.routed_experts[:, layers])
    assert (scores["logprobs"] - scores["free"]).abs().mean() > 1e-2
    assert 0.5 < scores["free_metrics"]["router/differs"] <= 1
    both = worlds(1).call(routing.own_routing, folders[name], BATCH)[0]
    for record, freely in zip(both["plain"]["records"], scores["free_records"], strict=True):
        assert torch.equal(record, freely)
    assert torch.equal(both["plain"]["logprobs"], scores["free"]) and torch.equal(both["replayed"]["logprobs"], scores["free"])
    assert both["replayed"]["metrics"] == {**both["plain"]["metrics"], "router/differs": 0.0}
    for weight, value in both["plain"]["masters"].items():
        assert torch.equal(value, both["replayed"]["masters"][weight]), weight


REPLAYED = [("qwen3_moe", "ep2_pp2"), ("qwen3_moe", "tp2_ep2_etp2"), ("deepseek_v3", "tp2_ep2_etp1")]
LONG_REPLAYED = [*(("qwen3_moe", name) for name in ("tp2", "tp2_etp1", "ep2", "ep4", "tp2_ep2_etp1")), ("deepseek_v3", "ep2_pp2")]


@pytest.mark.parametrize("name, layout", [*REPLAYED, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_REPLAYED)])
def test_replay_in_any_layout_equals_that_of_one_process(worlds, folders, alone, name, layout):
    sizes, expected = LAYOUTS[layout], alone[name]
    ranks = worlds(sizes.world_size).call(routing.scores, folders[name], ROUTED[name], sizes)
    for scores in ranks:
        for kind in ("metrics", "free_metrics"):
            assert scores[kind] == pytest.approx(expected[kind], rel=1e-5)
            assert scores[kind]["router/dropped"] == 0
        for kind in ("records", "free_records"):
            assert all(torch.equal(record, other) for record, other in zip(scores[kind], expected[kind], strict=True))
        for kind in ("logprobs", "free"):
            assert torch.allclose(scores[kind], expected[kind], atol=1e-4)
    for key in ("loss/total", "grad_norm"):
        assert ranks[0]["step"][key] == pytest.approx(expected["step"][key], rel=1e-5)
    assert_same_masters(folders[name], expected["masters"], ranks[0]["masters"])


def assert_same_masters(folder, expected: dict, masters: dict) -> None:
    start = read_weights(folder)
    for weight, value in expected.items():
        assert (value - masters[weight]).norm() <= 1e-3 * (value - start[weight]).norm(), weight


@pytest.mark.parametrize(
    "layout, options", [(None, FULL), ("ep2_pp2", {"recompute_granularity": "selective", "recompute_modules": ["moe"]})]
)
def test_recomputed_activations_are_those_of_the_same_experts(worlds, folders, layout, options):
    """This includes several micro-batches that wait for their backward pass in a pipeline."""
    sizes = LAYOUTS[layout] if layout else Layout()
    args = folders["qwen3_moe"], ROUTED["qwen3_moe"], sizes, {"router_aux_loss": 0.5}
    kept, recomputed = (worlds(sizes.world_size).call(routing.scores, *args, recompute)[0] for recompute in (None, options))
    assert recomputed["step"]["grad_norm"] == pytest.approx(kept["step"]["grad_norm"], rel=1e-6)
    for weight, value in kept["masters"].items():
        torch.testing.assert_close(recomputed["masters"][weight], value, rtol=0, atol=1e-6)


BALANCED = {
    "qwen3_moe": {"router_aux_loss": 0.5, "micro_batch_tokens": 1},  # the loss is a micro-batch's: every sequence is one, in any layout
    "deepseek_v3": {"router_aux_loss": 0.5, "micro_batch_tokens": 1, "router_bias_rate": 0.01},
}


@pytest.mark.parametrize(
    "name, layouts",
    [
        ("qwen3_moe", ["ep2", "tp2_ep2_etp2", "ep2_pp2"]),
        pytest.param("deepseek_v3", ["tp2_etp1", "tp2_ep2_etp1"], marks=pytest.mark.long),
    ],
)
def test_balancing_in_any_layout_equals_that_of_one_process(worlds, folders, name, layouts):
    expected = worlds(1).call(routing.scores, folders[name], BATCH, None, BALANCED[name])[0]
    start = read_weights(folders[name])
    biases = [weight for weight in start if weight.endswith("correction_bias")]
    for layout in layouts:
        sizes = LAYOUTS[layout]
        scores = worlds(sizes.world_size).call(routing.scores, folders[name], BATCH, sizes, BALANCED[name])[0]
        assert scores["step"]["grad_norm"] == pytest.approx(expected["step"]["grad_norm"], rel=1e-5)
        assert_same_masters(folders[name], expected["masters"], scores["masters"])
    for weight in biases:
        moved = ((expected["masters"][weight] - start[weight]) / 0.01).round(decimals=3).abs()
        assert ((moved == 0) | (moved == 1)).all() and moved.any()


def test_the_load_balancing_loss_is_its_formula(worlds, folders):
    scores = worlds(1).call(routing.balance_gradient, folders["qwen3_moe"], BATCH, 0.3)[0]
    torch.testing.assert_close(scores["gradient"], scores["formula"], rtol=1e-4, atol=1e-8)
    assert scores["formula"].norm() > 1e-4


def test_the_bias_evens_the_load(worlds, folders):
    train = {"router_bias_rate": 0.05, "learning_rate": 1e-9}
    scores = worlds(1).call(routing.balance, folders["deepseek_v3"], BATCH, train, 10)[0]
    assert scores[-1]["router/load_mean"] - 1 < 0.6 * (scores[0]["router/load_mean"] - 1)


def test_a_broken_step_leaves_the_biases_as_they_were(worlds, folders):
    raised, moved = worlds(1).call(routing.break_a_step, folders["deepseek_v3"], BATCH)[0]
    assert "the loss of optimizer step 1 is nan" in raised and moved == 0


@pytest.mark.parametrize("replay", ["none", "engine", pytest.param("trainer", marks=pytest.mark.long)])
def test_the_loop_replays_what_it_is_told_to(worlds, folders, replay):
    """The scripted engine has the log-probs of the trainer's own routing, so replaying its different experts for one token is a
    mismatch."""
    first, second = worlds(1).call(routing.loop, folders["qwen3_moe"], replay)[0][1:]
    for row in (first, second):
        assert row["router/dropped"] == 0 and 1 <= row["router/load_mean"] <= row["router/load_max"]
        assert 0 < row["router/entropy_min"] <= row["router/entropy"] < 1.4  # ln 4
        assert {"router/load/layer_0", "router/load/layer_1"} <= row.keys()
        assert (row["mismatch/abs_mean"] > 1e-3) == (replay == "engine")
        assert (row.get("router/differs", 0.0) > 0.05) == (replay == "engine")
    assert ("mismatch/without_replay/abs_mean" in second) == (replay == "engine") and "mismatch/without_replay/abs_mean" not in first
    if replay == "engine":
        assert second["mismatch/without_replay/abs_max"] == 0 < second["router/differs_without_replay"] <= second["router/differs"]
