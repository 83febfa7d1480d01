"""Training of layers for multi-token prediction: the loss of transformers, no effect on the policy, and the numbers of one process in
every layout, through checkpoint, resume and export."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from support import trainer, transformers_reference
from support.fp8_checkpoints import add_mtp_layer, find_changed
from support.models import FP8, FP32, random_sequences, read_weights

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.mcore.optim.step_response import CHANGED, RESPONSE
from megatron_rl.mcore.weights.export import convert
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

FACTOR = 0.3
TRAIN = {"micro_batch_tokens": 60, "adam_eps": 1e-4, "mtp_loss_scaling_factor": FACTOR}
LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "ep2": Layout(dp=2, ep=2),
    "cp2": Layout(cp=2),
    "tp2_pp2": Layout(tp=2, pp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
}
CASES = [
    pytest.param(name, layout, marks=[] if layout in ("tp2", "pp2") else pytest.mark.long)
    for layout in LAYOUTS
    for name in (["deep"] if layout == "pp2_vpp2" else ["deepseek", "glm"])
]


def batches() -> list[list[TrainingSample]]:
    return [
        [replace(sample, advantage=float(number % 3) - 1) for number, sample in enumerate(random_sequences(count, seed=seed))]
        for count, seed in ((7, 1), (5, 2))
    ]


@pytest.fixture(scope="module")
def models(model_folder, tmp_path_factory):
    """Maps a name to a checkpoint with one such layer, or two."""
    made = {}
    for name, family, layers, ahead in (("deepseek", "deepseek_v3", 2, 1), ("glm", "glm4_moe_air", 2, 1), ("deep", "glm4_moe_air", 4, 2)):
        made[name] = tmp_path_factory.mktemp(name) / "model"
        shutil.copytree(model_folder(family, num_hidden_layers=layers), made[name])
        add_mtp_layer(made[name], layers=ahead)
    return made


@pytest.fixture(scope="module")
def train_alone(worlds, models):
    results: dict = {}

    def get(name, precision, **train):
        key = name, *precision.values(), *train.items()
        if key not in results:
            results[key] = worlds(1).call(trainer.train_grpo, models[name], precision, TRAIN | train, batches(), Layout(), 0.0)[0]
        return results[key]

    return get


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_the_loss_is_that_of_transformers(models, train_alone, name):
    expected = transformers_reference.mtp_loss(models[name], [vars(sample) for sample in batches()[0]])
    assert train_alone(name, FP32)["steps"][0]["loss/mtp"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name, precision", [("deepseek", FP8), ("glm", FP8 | {"high": "bf16"})])
def test_the_policy_does_not_notice(train_alone, name, precision):
    """Its log-probs, weights, blocks and metrics have the bits of a run that does not train the layer."""
    trained, kept = train_alone(name, precision), train_alone(name, precision, mtp_loss_scaling_factor=0.0)
    for moment in ("before", "after"):
        assert torch.equal(trained[moment], kept[moment])
    changed = [name for name, tensor in kept["masters"].items() if not torch.equal(tensor, trained["masters"][name])]
    assert changed == [] and trained["blocks"].keys() > kept["blocks"].keys()
    own = {"loss/mtp", "loss/total", RESPONSE, CHANGED}  # the response is that of all weights
    for row, other in zip(trained["steps"], kept["steps"], strict=True):
        assert {name: row[name] for name in row.keys() - own} == {name: other[name] for name in other.keys() - own}
        assert row["loss/total"] == pytest.approx(other["loss/total"] + FACTOR * row["loss/mtp"])


def test_the_layer_learns(worlds, models):
    train, steps = {**TRAIN, "learning_rate": 5e-3, "adam_eps": 1e-8}, [batches()[0]] * 8
    rows = worlds(1).call(trainer.train_grpo, models["glm"], FP8, train, steps, Layout(), 0.0)[0]["steps"]
    assert rows[-1]["loss/mtp"] < 0.95 * rows[0]["loss/mtp"], "on the same answers, step after step"


@pytest.mark.parametrize("name, layout", CASES)
def test_every_layout_trains_the_same_layers(worlds, models, train_alone, name, layout):
    sizes = LAYOUTS[layout]
    alone, shared = (
        train_alone(name, FP32),
        worlds(sizes.world_size).call(trainer.train_grpo, models[name], FP32, TRAIN, batches(), sizes, 0.0)[0],
    )
    for row, other in zip(shared["steps"], alone["steps"], strict=True):
        assert row["loss/mtp"] == pytest.approx(other["loss/mtp"], rel=1e-5) and row["grad_norm"] == pytest.approx(
            other["grad_norm"], rel=1e-4
        )
    assert shared["masters"].keys() == alone["masters"].keys()
    for tensor, expected in alone["masters"].items():
        torch.testing.assert_close(shared["masters"][tensor], expected, rtol=1e-3, atol=2e-5, msg=tensor)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_have_the_same_gradient(train_alone, recompute):
    plain, recomputed = train_alone("glm", FP8), train_alone("glm", FP8, recompute=recompute)
    assert all(torch.equal(tensor, recomputed["masters"][name]) for name, tensor in plain["masters"].items())


def test_they_go_through_checkpoint_resume_and_export(worlds, models, tmp_path):
    """The export holds the trained layers, with copies of the current embedding and output layer, and loads like any checkpoint."""
    source, run = models["glm"], tmp_path / "run"
    saved = worlds(2).call(trainer.save_checkpoint, source, FP8, batches()[0], run, Layout(pp=2), TRAIN)[0]
    assert not (run / "mtp").exists() and "megatron_rl" not in json.dumps(read_config(run / "hf"))
    loaded = worlds(2).call(trainer.resume_checkpoint, source, FP8, run, Layout(tp=2), TRAIN)[0]
    assert find_changed(saved["masters"], loaded["masters"]) == []
    convert(run, tmp_path / "export", {"mode": "fp8_unified"})
    exported, config = read_weights(tmp_path / "export"), read_config(tmp_path / "export")
    HFCheckpoint(tmp_path / "export", config).check(ModelGeometry.from_hf_config(config))
    assert config["num_nextn_predict_layers"] == 1
    as_bytes = {name: tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in exported.items()}
    prefix = "model.layers.2."
    own = [name for name in saved["blocks"] if name.startswith(prefix)]
    assert len(own) > 40 and find_changed({name: saved["blocks"][name] for name in own}, as_bytes) == []
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    assert all(torch.equal(exported[prefix + copy], exported[original]) for copy, original in copies.items())
    before = read_weights(source)
    assert not torch.equal(exported[f"{prefix}eh_proj.weight"], before[f"{prefix}eh_proj.weight"]), "it was trained"
