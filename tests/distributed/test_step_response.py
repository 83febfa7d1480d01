"""The response of an optimizer step, sampled in strips on every rank, is the response of the whole model, in every mode and layout."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file
from support import trainer
from support.models import FP8, FP32, make_checkpoint, random_sequences, read_weights

from megatron_rl.mcore.optim.step_response import CHANGED, RESPONSE
from megatron_rl.mcore.weights.export import export_checkpoint
from parallel.layout import Layout

STEP = {"learning_rate": 1e-4}
ROLLOUT = {mode: {"mode": mode, "high": "fp32"} for mode in ("fp8_rollout", "int8_rollout")}


@pytest.fixture(scope="module")
def bf16_checkpoint(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("bf16"))
    save_file({name: tensor.bfloat16() for name, tensor in read_weights(folder).items()}, folder / "model.safetensors")
    return folder


def responses(world, folder, precision, layout=None, train=STEP, *options) -> list[tuple[dict, dict]]:
    """Return the sampled and the whole response of each step. Every rank gets the same."""
    batches = [random_sequences(4, 1), random_sequences(4, 2)]
    first, *others = world.call(trainer.measure_response, folder, precision, train, batches, layout, *options)
    assert all([sampled for sampled, _ in other] == [sampled for sampled, _ in first] for other in others)
    return first


@pytest.mark.parametrize(
    "precision, layout",
    [
        (FP8, Layout()),
        (FP8, Layout(tp=2)),
        (FP8, Layout(pp=2)),
        (FP8, Layout(dp=2)),
        (FP8, Layout(dp=2, ep=2)),
        (FP8, Layout(tp=2, dp=2)),
        (ROLLOUT["fp8_rollout"], Layout(tp=2)),
        (ROLLOUT["int8_rollout"], Layout(tp=2)),
    ],
    ids=lambda case: str(case.world_size) if isinstance(case, Layout) else case["mode"],
)
def test_it_is_that_of_the_whole_model_and_about_1_for_random_weights(worlds, checkpoint, model_folder, precision, layout):
    folder = checkpoint
    if layout.ep > 1:
        folder = model_folder("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0])
    elif layout.tp == layout.dp == 2:  # some of its weights are whole on every rank
        folder = model_folder("deepseek_v3", num_hidden_layers=2)
    for sampled, whole in responses(worlds(layout.world_size), folder, precision, layout):
        assert sampled == pytest.approx(whole, rel=1e-4)
        assert 0.8 < sampled[RESPONSE] < 1.5
        # in INT8 a whole row follows its largest weight, through its scale
        assert sampled[CHANGED] > 0.9 if precision["mode"] == "int8_rollout" else 0 < sampled[CHANGED] < 0.1


def first_responses(world, folder, precision) -> list[dict]:
    """Return the first response with masters that are the checkpoint's numbers, and with masters spread over the intervals that round to
    them."""
    return [
        responses(world, folder, {**precision, "masters": masters}, Layout(), {"learning_rate": 1e-6})[0][0]
        for masters in ("stored", "spread")
    ]


@pytest.mark.parametrize("precision", [FP8, ROLLOUT["fp8_rollout"]], ids=lambda precision: precision["mode"])
def test_masters_on_ties_show_in_the_first_step_and_spread_ones_do_not(worlds, bf16_checkpoint, precision):
    """One BF16 weight in 16 is on a tie of E4M3, and a step of 1e-6 moves half of these by a whole E4M3 step."""
    stored, spread = first_responses(worlds(1), bf16_checkpoint, precision)
    assert stored[RESPONSE] > 10 and stored[CHANGED] > 0.02
    assert 0.5 < spread[RESPONSE] < 2 and spread[CHANGED] < 0.002


@pytest.mark.parametrize("mode", ["bf16", "fp8_rollout", "fp8_unified"])
def test_masters_in_the_middle_of_their_cells_stand_still_and_spread_ones_do_not(worlds, bf16_checkpoint, tmp_path, mode):
    """This holds for BF16 parameters, and for an FP8 checkpoint's blocks."""
    folder = bf16_checkpoint
    if mode == "fp8_unified":
        export_checkpoint(folder, folder := tmp_path / "fp8", "fp8")
    stored, spread = first_responses(worlds(1), folder, {"mode": mode, "high": "bf16"})
    assert stored[RESPONSE] < 0.2 and 0.5 < spread[RESPONSE] < 2


def test_a_sample_of_the_weights_is_near_the_whole(worlds, checkpoint):
    for sampled, whole in responses(worlds(1), checkpoint, FP8, Layout(), STEP, 1 << 17):
        assert sampled[RESPONSE] != whole[RESPONSE] and sampled[RESPONSE] == pytest.approx(whole[RESPONSE], rel=0.2)


@pytest.mark.parametrize("mode", ["bf16", "fp8_rollout"])
def test_masters_of_bf16_weights_count_once_wherever_they_are(worlds, checkpoint, mode):
    """Replicas hold a slice each, one process holds all."""
    precision = {"mode": mode, "high": "bf16"}
    sliced, whole = (
        [sampled for sampled, _ in responses(worlds(dp), checkpoint, precision, Layout(dp=dp), {**STEP, "adam_eps": 1e-4})] for dp in (2, 1)
    )
    assert sliced == [pytest.approx(step, rel=1e-3) for step in whole] and all(step[RESPONSE] > 0 for step in sliced)


def test_without_a_grid_there_is_nothing_to_measure(worlds, checkpoint):
    assert [sampled for sampled, _ in responses(worlds(1), checkpoint, FP32)] == [{}, {}]
