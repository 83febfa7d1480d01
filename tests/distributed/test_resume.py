"""A resumed run computes, bit for bit, what an uninterrupted run computes. In another layout it starts from equal weights."""

from __future__ import annotations

import pytest
import torch
from support import trainer, training_runs
from support.fp8_checkpoints import make_fp8_checkpoint
from support.models import FP8, random_sequences

from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint.folder import list_newest_first
from megatron_rl.training.resume import choose_checkpoint, find_newest_whole
from parallel.layout import Layout

BF16 = {"mode": "fp8_unified", "high": "bf16"}
LAYER_KV = FP8 | {"kv": "e4m3_per_layer"}
STEPS = 4


@pytest.fixture(scope="module")
def deep(model_folder):
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory):
    return make_fp8_checkpoint(tmp_path_factory.mktemp("fp8"), num_hidden_layers=2)


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "memory/"))} for row in rows]


def assert_goes_on(world, checkpoint, tmp_path, precision, layout=None) -> None:
    straight = world.call(training_runs.train_to, checkpoint, tmp_path / "straight", STEPS, precision, False, layout)
    first = world.call(training_runs.train_to, checkpoint, tmp_path / "run", 2, precision, False, layout)
    second = world.call(training_runs.train_to, checkpoint, tmp_path / "run", STEPS, precision, True, layout)
    rows = without_times(first[0]["rows"]) + without_times(second[0]["rows"])
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and rows[-1]["grad_norm"] > 0
    assert 0.7 < rows[2]["clip/bound_low"] < rows[3]["clip/bound_low"] < 0.8, "calibrated bounds move in both parts"
    assert rows == without_times(straight[0]["rows"])
    for whole, part in zip(straight, second, strict=True):
        assert any(name.endswith(".kv_scales") for name in whole["bytes"]) == (precision is LAYER_KV)
        assert [name for name in whole["bytes"] if whole["bytes"][name] != part["bytes"][name]] == []
    assert [folder.name for folder in list_newest_first(tmp_path / "run")] == ["step_00004", "step_00003"]


def assert_same_state(expected: dict, loaded: dict) -> None:
    """Assert equal weights, and an equal next step."""
    assert all(torch.equal(scales, expected["scales"][name]) and (scales != 1).all() for name, scales in loaded["scales"].items())
    assert expected["masters"].keys() == loaded["masters"].keys()
    assert [name for name in expected["masters"] if not torch.equal(loaded["masters"][name], expected["masters"][name])] == []
    for name, after in expected["after"].items():  # the same moments: fresh ones would move every weight by the learning rate
        moved = (after - expected["masters"][name]).norm()
        assert (loaded["after"][name] - after).norm() < 0.3 * moved, name


@pytest.mark.parametrize("precision", [BF16, pytest.param(FP8, marks=pytest.mark.long)], ids=["bf16", "fp32"])
def test_a_run_of_one_rank_goes_on_bit_for_bit(worlds, checkpoint, tmp_path, precision):
    assert_goes_on(worlds(1), checkpoint, tmp_path, precision)


def test_a_run_of_two_ranks_goes_on_bit_for_bit_and_any_layout_loads_it(worlds, checkpoint, tmp_path):
    assert_goes_on(worlds(2), checkpoint, tmp_path, LAYER_KV)
    run = tmp_path / "run"
    expected = worlds(2).call(training_runs.load_in, checkpoint, run, LAYER_KV, Layout(tp=2))[0]
    for layout in (Layout(), Layout(pp=2), Layout(dp=2)):
        loaded = worlds(layout.world_size).call(training_runs.load_in, checkpoint, run, LAYER_KV, layout)[0]
        assert_same_state(expected, loaded)
        assert [line for line in loaded["remarks"] if line.startswith("it was written with another train.layout")], loaded["remarks"]
    assert not [line for line in expected["remarks"] if line.startswith("another")]


@pytest.mark.long
def test_replicas_that_share_the_optimizer_go_on_bit_for_bit_and_any_layout_loads_it(worlds, checkpoint, tmp_path):
    layout = Layout(dp=2)
    assert_goes_on(worlds(2), checkpoint, tmp_path, FP8, layout)
    run = tmp_path / "run"
    expected = worlds(2).call(training_runs.load_in, checkpoint, run, FP8, layout)[0]
    for other in (Layout(), Layout(tp=2)):
        loaded = worlds(other.world_size).call(training_runs.load_in, checkpoint, run, FP8, other)[0]
        assert_same_state(expected, loaded)
        assert [line for line in loaded["remarks"] if line.startswith("it was written with another train.layout")], loaded["remarks"]


@pytest.mark.parametrize("precision", [FP8, BF16], ids=["fp32", "bf16"])
def test_what_replicas_share_of_the_optimizer_is_what_each_would_have(worlds, checkpoint, precision):
    """In BF16 one optimizer has 16-bit weights with FP32 masters, and FP8 weights."""
    batch = random_sequences(4, seed=5)
    (first, loaded), (second, loaded_too) = worlds(2).call(training_runs.saved_and_loaded_state, checkpoint, precision, batch, 2)
    whole = worlds(1).call(training_runs.saved_and_loaded_state, checkpoint, precision, batch, 1)[0][0]
    assert first and second and not first.keys() & second.keys(), "each rank has its turns"
    shared, loaded = first | second, loaded | loaded_too
    assert {name.split(".")[0] for name in shared} == {"exp_avg", "exp_avg_sq", "weight"} | ({"master"} if precision is BF16 else set())
    assert shared.keys() == loaded.keys() == whole.keys()
    tolerance = 0.02 if precision is BF16 else 1e-4  # gradients are summed in another order, those of norms in BF16
    for name, expected in whole.items():
        assert (shared[name] - expected).norm() <= tolerance * expected.norm() > 0, name
        assert torch.equal(loaded[name], shared[name] + 1), name


@pytest.mark.long
def test_virtual_stages_go_on_bit_for_bit_and_one_process_loads_them(worlds, deep, tmp_path):
    layout = Layout(pp=2, vpp=2, dp=2)
    assert_goes_on(worlds(4), deep, tmp_path, FP8, layout)
    expected = worlds(4).call(training_runs.load_in, deep, tmp_path / "run", FP8, layout)[0]
    assert_same_state(expected, worlds(1).call(training_runs.load_in, deep, tmp_path / "run", FP8, Layout())[0])


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(tp=2, cp=2), marks=pytest.mark.long), Layout(pp=2, first_stage_layers=3)], ids=["cp", "pp"]
)
def test_context_ranks_and_unequal_stages_load_into_one_process(worlds, deep, tmp_path, layout):
    world = worlds(layout.world_size)
    world.call(training_runs.train_to, deep, tmp_path, 1, FP8, False, layout)
    expected = world.call(training_runs.load_in, deep, tmp_path, FP8, layout)[0]
    assert_same_state(expected, worlds(1).call(training_runs.load_in, deep, tmp_path, FP8, Layout())[0])


@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(tp=2, pp=2, dp=2), marks=pytest.mark.long)], ids=["alone", "tp2_pp2_dp2"])
def test_a_critic_goes_on_bit_for_bit(worlds, checkpoint, tmp_path, layout):
    world, algorithm = worlds(layout.world_size), {"advantage": "gae", "lam": 0.9, "kl_in": "reward"}

    def train(run: str, steps: int, go_on: bool = False) -> list[dict]:
        return world.call(training_runs.train_to, checkpoint, tmp_path / run, steps, BF16, go_on, layout, "", algorithm)

    straight, first, second = train("straight", STEPS), train("run", 2), train("run", STEPS, True)
    rows = without_times(first[0]["rows"]) + without_times(second[0]["rows"])
    assert rows == without_times(straight[0]["rows"]) and rows[-1]["critic/grad_norm"] > 0 != rows[-1]["critic/values_mean"]
    for whole, part in zip(straight, second, strict=True):
        names = [name for name in whole["bytes"] if name.startswith("critic ")]
        assert len([name for name in names if "exp_avg" in name or "master" in name]) > 10
        assert [name for name in whole["bytes"] if whole["bytes"][name] != part["bytes"][name]] == []


def test_a_run_that_replays_groups_goes_on_bit_for_bit_and_measures_no_precision_of_them(worlds, checkpoint, tmp_path):
    replay = {"prompts_per_step": 3, "max_replays": 2, "max_staleness": 2}

    def train(run: str, steps: int, go_on: bool = False) -> list[dict]:
        return worlds(2).call(training_runs.train_to, checkpoint, tmp_path / run, steps, BF16, go_on, Layout(dp=2), "", None, replay)

    straight, first, second = train("straight", STEPS), train("run", 2), train("run", STEPS, True)
    rows = without_times(first[0]["rows"]) + without_times(second[0]["rows"])
    assert rows == without_times(straight[0]["rows"])
    assert [row["replay/groups"] for row in rows[1:]] == [0, 3, 3, 3]
    assert rows[2]["staleness/max"] == 1 and rows[2]["staleness/share"] == rows[2]["replay/share"] > 0.4
    assert rows[2]["mismatch/position/0/tokens"] == rows[1]["mismatch/position/0/tokens"], "of the step's own groups alone"
    for whole, part in zip(straight, second, strict=True):
        assert [name for name in whole["bytes"] if whole["bytes"][name] != part["bytes"][name]] == []
    assert (tmp_path / "run" / "checkpoints" / "step_00004" / "replay.npz").is_file()


def test_no_checkpoint_is_written_between_a_critics_update_and_the_policys(worlds, checkpoint, tmp_path):
    args = checkpoint, tmp_path, 3, FP8, False, None, "policy's update", {"advantage": "gae"}
    loaded = worlds(1).call(training_runs.train_to, *args)[0]
    assert loaded["messages"][-1] == "the weights are between policy versions 1 and 2"
    assert find_newest_whole(tmp_path)[0].name == "step_00001"


@pytest.mark.long
def test_experts_load_into_another_layout(worlds, model_folder, tmp_path):
    qwen3_moe = model_folder("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0])
    worlds(4).call(training_runs.train_to, qwen3_moe, tmp_path, 1, FP8, False, Layout(ep=2, dp=2, pp=2))
    expected = worlds(4).call(training_runs.load_in, qwen3_moe, tmp_path, FP8, Layout(ep=2, dp=2, pp=2))[0]
    loaded = worlds(2).call(training_runs.load_in, qwen3_moe, tmp_path, FP8, Layout(dp=2))[0]
    assert [name for name in expected["masters"] if not torch.equal(loaded["masters"][name], expected["masters"][name])] == []


def test_a_torn_checkpoint_is_refused_and_the_one_before_used(worlds, checkpoint, tmp_path):
    straight = worlds(1).call(training_runs.train_to, checkpoint, tmp_path, 3, FP8)[0]
    torn = list_newest_first(tmp_path)[0]
    data = max((torn / "mcore").glob("*.distcp"), key=lambda file: file.stat().st_size)
    with data.open("rb+") as file:
        file.truncate(data.stat().st_size // 2)
    again = worlds(1).call(training_runs.train_to, checkpoint, tmp_path, 3, FP8, True)[0]
    assert [line for line in again["messages"] if line.startswith(f"step_00003 is incomplete: mcore/{data.name} has ")]
    assert again["rows"][-1]["step"] == 3 and again["bytes"] == straight["bytes"]
    assert find_newest_whole(tmp_path) == (torn, {}), "the new one took the torn one's place"


def test_what_breaks_after_a_policys_last_optimizer_step_is_kept_with_its_row(worlds, checkpoint, tmp_path):
    straight = worlds(1).call(training_runs.train_to, checkpoint, tmp_path / "straight", 3, FP8)[0]
    first = worlds(1).call(training_runs.train_to, checkpoint, tmp_path / "run", 3, FP8, False, None, "sync")[0]
    assert first["messages"] == ["the engine is gone", f"checkpoint {tmp_path}/run/checkpoints/step_00002"]
    assert [row["step"] for row in first["rows"]] == [0, 1]
    second = worlds(1).call(training_runs.train_to, checkpoint, tmp_path / "run", 3, FP8, True)[0]
    rows = without_times(first["rows"] + second["rows"])
    assert rows == without_times(straight["rows"]) and second["bytes"] == straight["bytes"]


def test_what_breaks_within_an_optimizer_step_is_not_kept(worlds, checkpoint, tmp_path):
    loaded = worlds(1).call(training_runs.train_to, checkpoint, tmp_path, 3, FP8, False, None, "optimizer step")[0]
    assert "stopped in an optimizer step" in loaded["messages"]
    assert loaded["messages"][-1] == "the weights are between policy versions 1 and 2"
    newest, torn = find_newest_whole(tmp_path)
    assert (newest.name, torn) == ("step_00001", {})


def test_a_disk_that_is_full_costs_the_new_checkpoint_only(worlds, checkpoint, tmp_path):
    worlds(1).call(training_runs.train_to, checkpoint, tmp_path, 1, FP8)
    (line,) = worlds(1).call(training_runs.save_without_room, checkpoint, tmp_path, FP8, 2)[0]
    assert line.startswith("no checkpoint step_00002: rank 0: ") and "File too large" in line and line.endswith("; the run continues")
    assert find_newest_whole(tmp_path) == (tmp_path / "checkpoints" / "step_00001", {})


@pytest.mark.parametrize("trained", [False, True])
def test_an_imported_fp8_checkpoints_blocks_stay_until_they_are_trained(worlds, fp8_checkpoint, tmp_path, trained):
    loaded = worlds(1).call(training_runs.adopted_after_loading, fp8_checkpoint, tmp_path, FP8, trained)[0]
    assert loaded["adopted"][0] == loaded["adopted"][1] == [not trained] * 8
    assert loaded["different"] == []


def test_a_checkpoint_of_weights_alone_is_exported_but_no_run_goes_on_from_it(worlds, checkpoint, tmp_path):
    folder = tmp_path / "checkpoints" / "step_00001"
    folder.parent.mkdir()
    worlds(1).call(trainer.save_checkpoint, checkpoint, FP8, random_sequences(4, seed=1), folder)
    with pytest.raises(UserError, match="step_00001 holds only weights"):
        choose_checkpoint(tmp_path, 4)
