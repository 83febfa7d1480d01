"""The response of an optimizer step, sampled in strips on every rank, is the response of the whole model, in every mode and layout."""

from unittest import mock

import pytest
import torch
from support.models import FP8, FP32, make_bf16_checkpoint, random_sequences
from support.trainer import Trainer, own

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.mcore.checkpoint.export import export_checkpoint
from megatron_rl.mcore.weights import step_response
from megatron_rl.mcore.weights.step_response import CHANGED, RESPONSE
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import dequantize
from parallel.layout import Layout

STEP = {"learning_rate": 1e-4}
ROLLOUT = {mode: {"mode": mode, "high": "fp32"} for mode in ("fp8_rollout", "int8_rollout")}


def measure_response(folder, precision, train, batches, layout=None, elements=1 << 30):
    """Return for each step its response from a sample of `elements` values, and the response of the whole model's tensors. The latter is
    on rank 0 only, and requires that masters are FP32 parameters."""
    with mock.patch.object(step_response, "_ELEMENTS", elements), mock.patch.object(step_response, "_MIN_STRIPS", 1):
        trainer = Trainer(folder, precision, train, layout=layout)
    names, results = (step_response.RESPONSE, step_response.CHANGED), []

    def read():
        engine, format = trainer.collect_tensors(fp8=True), trainer.contract.engine_format
        blocks = {name: engine.get(format.scale_name(name)) for name in engine} if format.scale_suffix else {}
        data = {name: engine[name].view(getattr(torch, format.dtype)) for name, scale in blocks.items() if scale is not None}
        values = {name: dequantize(QuantizedWeight(data[name], blocks[name]), format) for name in data}
        return values, trainer.collect_tensors(fp8=False)

    for batch in batches:
        engine, masters = ({name: tensor.clone() for name, tensor in tensors.items()} for tensors in read())
        step = trainer.actor.update(own(batch), negative_log_likelihood)
        new_engine, new_masters = read()
        moved = [(new_engine[name] - engine[name]).abs() for name in engine]
        stepped = sum(float((new_masters[name] - masters[name]).abs().double().sum()) for name in engine)
        changed = sum(int((values > 0).sum()) for values in moved) / max(sum(values.numel() for values in moved), 1)
        whole = (sum(float(values.double().sum()) for values in moved) / stepped, changed) if stepped else (0.0, 0.0)
        results.append(({name: step[name] for name in names if name in step}, dict(zip(names, whole, strict=True))))
    return results


@pytest.fixture(scope="module")
def bf16_checkpoint(tmp_path_factory):
    return make_bf16_checkpoint(tmp_path_factory.mktemp("bf16"))


def responses(world, folder, precision, layout=None, train=STEP, *options):
    """Return the sampled and the whole response of each step. Every rank gets the same."""
    batches = [random_sequences(4, 1), random_sequences(4, 2)]
    first, *others = world.call(measure_response, folder, precision, train, batches, layout, *options)
    assert all([sampled for sampled, _ in other] == [sampled for sampled, _ in first] for other in others)
    return first


@pytest.mark.default_cases(4)
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


@pytest.mark.parametrize(
    "mode, high, on_ties",
    [
        *((mode, "fp32", True) for mode in ("fp8_unified", "fp8_rollout")),
        *((mode, "bf16", False) for mode in ("bf16", "fp8_rollout", "fp8_unified")),
    ],
)
def test_masters_on_ties_move_at_once_those_in_mid_cell_stand_still(worlds, bf16_checkpoint, tmp_path, mode, high, on_ties):
    """Spread ones do neither. One BF16 weight in 16 is on a tie of E4M3, and a step of 1e-6 moves half of these by a whole E4M3 step. BF16
    parameters and an FP8 checkpoint's blocks are in the middle."""
    folder = bf16_checkpoint
    if mode == "fp8_unified" and not on_ties:
        export_checkpoint(folder, folder := tmp_path / "fp8", "fp8")
    stored, spread = (
        responses(worlds(1), folder, {"mode": mode, "high": high, "masters": masters}, Layout(), {"learning_rate": 1e-6})[0][0]
        for masters in ("stored", "spread")
    )
    assert 0.5 < spread[RESPONSE] < 2
    if on_ties:
        assert stored[RESPONSE] > 10 and stored[CHANGED] > 0.02 and spread[CHANGED] < 0.002
    else:
        assert stored[RESPONSE] < 0.2


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
