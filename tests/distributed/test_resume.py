"""A resumed run computes, bit for bit, what an uninterrupted run computes. In another layout it starts from equal weights."""

import resource
import shutil

import pytest
import torch
from support import trainer, training_runs
from support.fp8_checkpoints import make_fp8_checkpoint
from support.models import FP8, random_sequences
from support.trainer import Trainer, negative_log_likelihood, own
from support.training_runs import resumable_config, without_times

from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.folder import list_newest_first
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.weights.cache_scales import collect_scales
from megatron_rl.training.checkpoint_manager import CheckpointManager, TrainState
from megatron_rl.training.resume import choose_checkpoint, describe_layout, find_newest_whole
from parallel.layout import Layout

BF16 = {"mode": "fp8_unified", "high": "bf16"}
LAYER_KV = FP8 | {"kv": "e4m3_per_layer"}
STEPS = 4


def load_in(folder, run, precision, layout):
    """Load a run's newest checkpoint. Return masters, key-value scales, remarks, and the masters after one more optimizer step."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-3}, layout=layout)
    saved, place = choose_checkpoint(run, 99), describe_layout(layout, trainer.train)
    load_run_checkpoint(saved.folder, trainer.model, trainer.actor.optimizer, saved.state, saved.matches_layout(place))
    result = {"masters": trainer.collect_tensors(fp8=False), "scales": collect_scales(trainer.model), "remarks": saved.describe(place)}
    trainer.actor.steps_done = saved.state["optimizer_steps"]
    trainer.actor.update(own(random_sequences(4, seed=5)), negative_log_likelihood)
    return result | {"after": trainer.collect_tensors(fp8=False)}


def adopted_after_loading(folder, run, precision, trained):
    """Save the trainer of an FP8 checkpoint, after a step or before any, and load it into a fresh one. Return which layers of both still
    have the checkpoint's blocks (`adopted`), and the names of tensors that differ."""
    first, second = (Trainer(folder, precision) for _ in range(2))
    if trained:
        first.actor.update(own(random_sequences(4, seed=5)), negative_log_likelihood)
    config = resumable_config(folder, 99, precision)
    state = TrainState(1, first.actor.steps_done, (0.8, 1.2), dict)
    CheckpointManager(config, first.layout, run, first.actor, first.hf_config, print, -1).write(state, last=True)
    saved = choose_checkpoint(run, 99)
    load_run_checkpoint(saved.folder, second.model, second.actor.optimizer, saved.state, True)
    adopted = [[layer.adopted for layer in find_quantized_layers(trainer.model).values()] for trainer in (first, second)]
    before, after = first.collect_named_tensors(), second.collect_named_tensors()
    raw = {name: (before[name].contiguous().view(torch.uint8), after[name].contiguous().view(torch.uint8)) for name in before}
    return {"adopted": adopted, "different": [name for name, (one, two) in raw.items() if not torch.equal(one, two)]}


def save_without_room(folder, run, precision, step):
    """Try to save while no file may exceed 64 KiB; return the messages."""
    trainer, messages = Trainer(folder, precision), []
    config = resumable_config(folder, 99, precision)
    checkpoints = CheckpointManager(config, trainer.layout, run, trainer.actor, trainer.hf_config, messages.append, -1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        checkpoints.write(TrainState(step, trainer.actor.steps_done, (0.8, 1.2), dict), last=False)
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return messages


@pytest.fixture(scope="module")
def deep(model_folder):
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory):
    return make_fp8_checkpoint(tmp_path_factory.mktemp("fp8"), num_hidden_layers=2)


def assert_goes_on(world, checkpoint, tmp_path, precision, *options):
    """Assert that a run that goes on has the rows and the bytes of one that was not interrupted. Return its rows and the names of its
    tensors on each rank. `options` are those of `train_to` from its layout on."""

    def train(run, steps, go_on=False):
        return world.call(training_runs.train_to, checkpoint, tmp_path / run, steps, precision, go_on, *options)

    straight, first, second = train("straight", STEPS), train("run", 2), train("run", STEPS, True)
    rows = without_times(first[0]["rows"]) + without_times(second[0]["rows"])
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and rows[-1]["grad_norm"] > 0
    assert rows == without_times(straight[0]["rows"])
    for whole, part in zip(straight, second, strict=True):
        assert any(name.endswith(".kv_scales") for name in whole["bytes"]) == (precision is LAYER_KV)
        assert [name for name in whole["bytes"] if whole["bytes"][name] != part["bytes"][name]] == []
    assert [folder.name for folder in list_newest_first(tmp_path / "run")] == ["step_00004", "step_00003"]
    return rows, [rank["bytes"].keys() for rank in straight]


def assert_same_state(expected, loaded):
    """Assert equal weights, and an equal next step."""
    assert all(torch.equal(scales, expected["scales"][name]) and (scales != 1).all() for name, scales in loaded["scales"].items())
    assert expected["masters"].keys() == loaded["masters"].keys()
    assert [name for name in expected["masters"] if not torch.equal(loaded["masters"][name], expected["masters"][name])] == []
    for name, after in expected["after"].items():  # the same moments: fresh ones would move every weight by the learning rate
        moved = (after - expected["masters"][name]).norm()
        assert (loaded["after"][name] - after).norm() < 0.3 * moved, name


@pytest.mark.parametrize("precision", [BF16, pytest.param(FP8, marks=pytest.mark.long)], ids=["bf16", "fp32"])
def test_a_run_of_one_rank_goes_on_bit_for_bit(worlds, checkpoint, tmp_path, precision):
    rows, _ = assert_goes_on(worlds(1), checkpoint, tmp_path, precision)
    assert 0.7 < rows[2]["clip/bound_low"] < rows[3]["clip/bound_low"] < 0.8, "calibrated bounds move in both parts"


@pytest.mark.long
def test_a_run_that_resumes_with_less_memory_has_the_same_bits_or_differs_in_rounding(worlds, checkpoint, tmp_path):
    """As docs/reference/resume.md says: recomputation and overlap change no bit, smaller micro-batches change the order of sums."""
    layout, saving = Layout(tp=2), {"recompute": "full", "overlap_grad_reduce": False, "overlap_param_gather": False}

    def train(run, steps, go_on=False, changes=None):
        return worlds(2).call(training_runs.train_to, checkpoint, tmp_path / run, steps, BF16, go_on, layout, "", None, None, changes)

    straight, _ = train("straight", 3), train("run", 2)
    for run, changes in {"same": saving, "overlapped": {"two_batch_overlap": "all"}, "rounded": {"micro_batch_tokens": 16}}.items():
        shutil.copytree(tmp_path / "run", tmp_path / run)
        resumed = train(run, 3, True, changes)
        different = [
            name
            for whole, part in zip(straight, resumed, strict=True)
            for name in whole["bytes"]
            if whole["bytes"][name] != part["bytes"][name]
        ]
        assert bool(different) == (run == "rounded")
        expected, row = (rank[0]["rows"][-1] for rank in (straight, resumed))
        assert row["step"] == 3 and row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "model, precision, layout, others",
    [
        ("dense", LAYER_KV, Layout(tp=2), (Layout(), Layout(pp=2), Layout(dp=2))),
        ("dense", FP8, Layout(dp=2), (Layout(), Layout(tp=2))),  # replicas share the optimizer
        pytest.param("deep", FP8, Layout(pp=2, vpp=2, dp=2), (Layout(),), marks=pytest.mark.long),
    ],
)
def test_a_run_of_several_ranks_goes_on_bit_for_bit_and_any_layout_loads_it(
    worlds, checkpoint, deep, tmp_path, model, precision, layout, others
):
    folder, world = {"dense": checkpoint, "deep": deep}[model], worlds(layout.world_size)
    assert_goes_on(world, folder, tmp_path, precision, layout)
    run = tmp_path / "run"
    expected = world.call(load_in, folder, run, precision, layout)[0]
    for other in others:
        loaded = worlds(other.world_size).call(load_in, folder, run, precision, other)[0]
        assert_same_state(expected, loaded)
        assert [line for line in loaded["remarks"] if line.startswith("it was written with another train.layout")], loaded["remarks"]
    assert not [line for line in expected["remarks"] if line.startswith("another")]


@pytest.mark.parametrize(
    "model, layout, other",
    [
        pytest.param("deep", Layout(tp=2, cp=2), Layout(), marks=pytest.mark.long),
        ("deep", Layout(pp=2, first_stage_layers=3), Layout()),
        pytest.param("experts", Layout(ep=2, dp=2, pp=2), Layout(dp=2), marks=pytest.mark.long),
        ("hybrid", Layout(tp=2), Layout(pp=2)),
        pytest.param("hybrid", Layout(tp=2, cp=2), Layout(), marks=pytest.mark.long),
    ],
    ids=["cp", "pp", "experts", "delta nets", "delta nets, cp"],
)
def test_context_ranks_unequal_stages_and_experts_load_into_another_layout(worlds, model_folder, deep, tmp_path, model, layout, other):
    name, changes = {"experts": ("qwen3_moe", {"mlp_only_layers": [0]}), "hybrid": ("qwen3_5_text", {})}.get(model, ("", {}))
    folder = deep if model == "deep" else model_folder(name, num_hidden_layers=2, **changes)
    precision = BF16 if model == "hybrid" and layout.cp > 1 else FP8  # a gated delta net has FP32 parameters beside 16-bit ones
    worlds(layout.world_size).call(training_runs.train_to, folder, tmp_path, 1, precision, False, layout)
    expected = worlds(layout.world_size).call(load_in, folder, tmp_path, precision, layout)[0]
    assert_same_state(expected, worlds(other.world_size).call(load_in, folder, tmp_path, precision, other)[0])


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(tp=2, pp=2, dp=2), marks=pytest.mark.long)], ids=["alone", "tp2_pp2_dp2"])
def test_a_critic_goes_on_bit_for_bit(worlds, checkpoint, tmp_path, layout):
    algorithm = {"advantage": "gae", "lam": 0.9, "kl_in": "reward"}
    rows, ranks = assert_goes_on(worlds(layout.world_size), checkpoint, tmp_path, BF16, layout, "", algorithm)
    assert rows[-1]["critic/grad_norm"] > 0 != rows[-1]["critic/values_mean"]
    for names in ranks:
        assert sum(name.startswith("critic ") and ("exp_avg" in name or "master" in name) for name in names) > 10


@pytest.mark.long
def test_a_run_that_replays_groups_goes_on_bit_for_bit_and_measures_no_precision_of_them(worlds, checkpoint, tmp_path):
    replay = {"prompts_per_step": 3, "max_replays": 2, "max_staleness": 2}
    rows, _ = assert_goes_on(worlds(2), checkpoint, tmp_path, BF16, Layout(dp=2), "", None, replay)
    assert [row["replay/groups"] for row in rows[1:]] == [0, 3, 3, 3]
    assert rows[2]["staleness/max"] == 1 and rows[2]["staleness/share"] == rows[2]["replay/share"] > 0.4
    assert rows[2]["mismatch/position/0/tokens"] == rows[1]["mismatch/position/0/tokens"], "of the step's own groups alone"
    assert (tmp_path / "run" / "checkpoints" / "step_00004" / "replay.npz").is_file()


def test_no_checkpoint_is_written_between_a_critics_update_and_the_policys(worlds, checkpoint, tmp_path):
    args = checkpoint, tmp_path, 3, FP8, False, None, "policy's update", {"advantage": "gae"}
    loaded = worlds(1).call(training_runs.train_to, *args)[0]
    assert loaded["messages"][-1] == "the weights are between policy versions 1 and 2"
    assert find_newest_whole(tmp_path)[0].name == "step_00001"


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
    (line,) = worlds(1).call(save_without_room, checkpoint, tmp_path, FP8, 2)[0]
    assert line.startswith("no checkpoint step_00002: rank 0: ") and "File too large" in line and line.endswith("; the run continues")
    assert find_newest_whole(tmp_path) == (tmp_path / "checkpoints" / "step_00001", {})


@pytest.mark.parametrize("trained", [False, True])
def test_an_imported_fp8_checkpoints_blocks_stay_until_they_are_trained(worlds, fp8_checkpoint, tmp_path, trained):
    loaded = worlds(1).call(adopted_after_loading, fp8_checkpoint, tmp_path, FP8, trained)[0]
    assert loaded["adopted"][0] == loaded["adopted"][1] == [not trained] * 8
    assert loaded["different"] == []


def test_a_checkpoint_of_weights_alone_is_exported_but_no_run_goes_on_from_it(worlds, checkpoint, tmp_path):
    folder = tmp_path / "checkpoints" / "step_00001"
    folder.parent.mkdir()
    worlds(1).call(trainer.save_checkpoint, checkpoint, FP8, random_sequences(4, seed=1), folder)
    with pytest.raises(UserError, match="step_00001 holds only weights"):
        choose_checkpoint(tmp_path, 4)
