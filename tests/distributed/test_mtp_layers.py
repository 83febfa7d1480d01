"""Layers for multi-token prediction. Trained: the loss of transformers, no effect on the policy, and the numbers of one process in every
layout, through checkpoint, resume and export. Not trained: their bytes stay through a run's checkpoint and its export."""

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import trainer
from support.families import parse_layout
from support.fp8_checkpoints import add_mtp_layer, find_changed, with_random_blocks
from support.golden import slow_fp8
from support.models import FP8, FP32, random_sequences, read_weights
from support.trainer import Trainer
from support.transformers_reference import load

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.align import Alignment
from megatron_rl.hf.files import read_config
from megatron_rl.hf.mtp_layers import MTPCopy, MTPLayers
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.export import convert
from megatron_rl.mcore.checkpoint.folder import find_damage
from megatron_rl.mcore.weights.step_response import CHANGED, RESPONSE
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

FACTOR = 0.3
TRAIN = {"micro_batch_tokens": 60, "adam_eps": 1e-4, "mtp_loss_scaling_factor": FACTOR}
CASES = [
    pytest.param(name, layout, marks=[] if layout in ("tp2", "pp2") else pytest.mark.long)
    for layout in ("tp2", "pp2", "dp2 ep2", "cp2", "tp2 pp2", "pp2 vpp2")
    for name in (["deep"] if layout == "pp2 vpp2" else ["deepseek", "glm"])
]


def resume_checkpoint(folder, precision, run, layout, train):
    """Return the masters and blocks of a trainer that has loaded a run's checkpoint."""
    trainer = Trainer(folder, precision, train, layout=layout)
    load_run_checkpoint(run, trainer.model, trainer.actor.optimizer, json.loads((run / "state.json").read_bytes()), same_layout=False)
    return trainer.collect_weights()


def compute_loss(folder, parent, samples):
    """Return the cross-entropy of the first layer for multi-token prediction per response token, computed by transformers as a model of
    one layer, which is written to `parent`."""
    tensors, hf_config, model = read_weights(folder), read_config(folder), load(folder)
    prefix = f"model.layers.{hf_config['num_hidden_layers']}."
    own = {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
    renamed = {f"model.layers.0.{name}": tensor for name, tensor in own.items() if re.match("self_attn|mlp|input|post", name)}
    renamed |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "torch_dtype": "float32"}
    write_checkpoint(parent, {**hf_config, **changes}, renamed | {"model.norm.weight": own["shared_head.norm.weight"]}, None)
    layer, eps, losses = load(parent), hf_config["rms_norm_eps"], []
    for sample in samples:
        ids, start = sample.ids[None].long(), len(sample.prompt_ids)
        with torch.no_grad():
            pairs = (model.get_input_embeddings()(ids[:, 1:]), "enorm"), (model.model(ids[:, :-1]).last_hidden_state, "hnorm")
            parts = [torch.nn.functional.rms_norm(x, x.shape[-1:], own[f"{name}.weight"], eps) for x, name in pairs]
            logprobs = layer(inputs_embeds=torch.cat(parts, -1) @ own["eh_proj.weight"].t()).logits[0].log_softmax(-1)
        losses += [-float(logprobs[place - 2, ids[0, place]]) for place in range(max(start, 2), ids.shape[1])]
    return math.fsum(losses) / sum(len(sample.response_ids) for sample in samples)


def batches():
    return [
        [replace(sample, advantage=float(number % 3) - 1) for number, sample in enumerate(random_sequences(count, seed=seed))]
        for count, seed in ((7, 1), (5, 2))
    ]


@pytest.fixture(scope="module")
def layers():
    """The tensors of the layers that `models` has added."""
    return {}


@pytest.fixture(scope="module")
def models(layers, model_folder, tmp_path_factory):
    """Maps a name to a checkpoint with one such layer, or two; "fp8" has power-of-two scales."""
    made = {}
    for name, family, depth, ahead in (
        ("deepseek", "deepseek_v3", 2, 1),
        ("glm", "glm4_moe_air", 2, 1),
        ("deep", "glm4_moe_air", 4, 2),
        ("fp8", "glm4_moe_air", 2, 1),
    ):
        made[name], scales = tmp_path_factory.mktemp(name) / "model", "pow2" if name == "fp8" else ""
        shutil.copytree(model_folder(family, num_hidden_layers=depth), made[name])
        if scales:
            with_random_blocks(made[name], scales, seed=3)
        layers[name] = add_mtp_layer(made[name], scales, layers=ahead)
    return made


@pytest.fixture(scope="module")
def train_alone(alone, models):
    return lambda name, precision, **train: alone(trainer.train_grpo, models[name], precision, TRAIN | train, batches(), Layout(), 0.0)


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_the_loss_is_that_of_transformers(models, train_alone, tmp_path, name):
    expected = compute_loss(models[name], tmp_path, batches()[0])
    assert train_alone(name, FP32)["steps"][0]["loss/mtp"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.default_cases(1)
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


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name, layout", CASES)
def test_every_layout_trains_the_same_layers(worlds, models, train_alone, name, layout):
    sizes = parse_layout(layout)
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


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_have_the_same_gradient(train_alone, recompute):
    plain, recomputed = train_alone("glm", FP8), train_alone("glm", FP8, recompute=recompute)
    assert all(torch.equal(tensor, recomputed["masters"][name]) for name, tensor in plain["masters"].items())


def test_they_go_through_checkpoint_resume_and_export(worlds, models, tmp_path):
    """The export holds the trained layers, with copies of the current embedding and output layer, and loads like any checkpoint."""
    source, run = models["glm"], tmp_path / "run"
    saved = worlds(2).call(trainer.save_checkpoint, source, FP8, batches()[0], run, Layout(pp=2), TRAIN)[0]
    assert not (run / "mtp").exists() and "megatron_rl" not in json.dumps(read_config(run / "hf"))
    loaded = worlds(2).call(resume_checkpoint, source, FP8, run, Layout(tp=2), TRAIN)[0]
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


@pytest.mark.parametrize("name", ["deepseek", "fp8"])
def test_a_trained_runs_export_holds_them_byte_for_byte(worlds, models, layers, tmp_path, name):
    source, layer = models[name], layers[name]
    run, precision = tmp_path / "step_00001", FP8 if name == "fp8" else {"mode": "bf16", "high": "bf16"}
    sequences = random_sequences(4, next(seed for seed in range(99) if max(s.length for s in random_sequences(4, seed)) % 2))
    worlds(2).call(trainer.save_checkpoint, source, precision, sequences, run, Layout(tp=2))
    assert find_changed(layer, read_weights(run / "mtp")) == [] and find_damage(run) == ""
    convert(run, tmp_path / "export", {})
    exported, config = read_weights(tmp_path / "export"), read_config(tmp_path / "export")
    assert find_changed(layer, exported) == [] and config["num_nextn_predict_layers"] == 1
    assert "model.norm.weight" in find_changed(read_weights(source), exported), "the others were trained"
    HFCheckpoint(tmp_path / "export", config).check(ModelGeometry.from_hf_config(config))
    torn = run / "mtp" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match=r"is damaged: mtp/model\.safetensors was modified after it was written"):
        convert(run, tmp_path / "torn", {})


def test_ranks_share_the_files_of_a_copy(models, layers, tmp_path):
    source, layer = models["glm"], layers["glm"]
    config = read_config(source)
    for size in (1, 2):
        (to := tmp_path / str(size)).mkdir()
        copies = [MTPCopy(source, config, rank, size, 1 << 18) for rank in range(size)]
        counts = [len(copy.write(to)) for copy in copies]
        assert sum(counts) > 8 and max(counts) - min(counts) <= 1
        assert sum(copy.nbytes for copy in copies) == sum(tensor.nbytes for tensor in layer.values())
    files = {file.name: file.read_bytes() for file in (tmp_path / "1" / "mtp").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "2" / "mtp").iterdir()}
    copy = HFCheckpoint(tmp_path / "2" / "mtp", config)
    assert find_changed(layer, {name: copy.read_stored(name) for name in layer}) == []


def test_another_precision_converts_their_decoder_as_it_does_the_others(models, layers, tmp_path):
    source, layer = models["glm"], layers["glm"]
    convert(source, tmp_path / "fp8", {"mode": "fp8_unified"})
    quantized = read_weights(tmp_path / "fp8")
    blocks = [name for name in layer if f"{name}_scale_inv" in quantized]
    assert len(blocks) == 4 + 3 * 9
    for name in blocks[:6]:
        codes, scales = slow_fp8.quantize_matrix(layer[name].float().numpy(), "pow2")
        assert np.array_equal(quantized[name].view(torch.uint8).numpy(), codes)
        assert np.array_equal(quantized[f"{name}_scale_inv"].numpy(), scales)
    assert sorted(find_changed(layer, quantized)) == sorted(blocks)

    source, layer = models["fp8"], layers["fp8"]
    convert(source, tmp_path / "bf16", {"mode": "bf16"})
    values = read_weights(tmp_path / "bf16")
    assert not any(name.endswith("_scale_inv") for name in values)
    for name in blocks:
        expected = dequantize_weight(QuantizedWeight(layer[name], layer[f"{name}_scale_inv"])).bfloat16()
        assert torch.equal(values[name], expected), name
    rest = {name: tensor for name, tensor in layer.items() if name.removesuffix("_scale_inv") not in blocks}
    assert len(rest) == 6 + 4 and find_changed(rest, values) == []


def test_scales_that_the_result_could_not_have_are_made_anew(model_folder, tmp_path):
    """With `fp8_rollout`, blocks whose scales are not powers of two are quantized again to blocks whose scales are."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder("glm4_moe_air", num_hidden_layers=2), folder)
    layer = add_mtp_layer(with_random_blocks(folder, "fp32", seed=3), "fp32")
    config, name = read_config(folder), "model.layers.2.self_attn.q_proj.weight"
    reader = MTPLayers(HFCheckpoint(folder, config), ModelGeometry.from_hf_config(config))
    for scales in ("fp32", "pow2"):
        contract = PrecisionContract.from_config(PrecisionConfig(mode="fp8_rollout", scale_format=scales))
        stored = reader.read(name, contract)
        assert sum(tensor.nbytes for tensor in stored.values()) == reader.count_bytes(contract)[name]
        assert (find_changed({name: layer[name]}, stored) == []) == (scales == "fp32")
        assert bool((torch.frexp(stored[f"{name}_scale_inv"]).mantissa == 0.5).all()) == (scales == "pow2")


def test_a_wider_model_has_none(models, layers, tmp_path):
    convert(models["glm"], tmp_path / "same", {"mode": "bf16"}, Alignment(128))
    assert find_changed(layers["glm"], read_weights(tmp_path / "same")) == []
    convert(models["glm"], tmp_path / "wide", {"mode": "bf16"}, Alignment(512))
    config = read_config(tmp_path / "wide")
    assert config["num_nextn_predict_layers"] == 0 and config["hidden_size"] == 512
    assert not any(name.startswith("model.layers.2.") for name in read_weights(tmp_path / "wide"))
    HFCheckpoint(tmp_path / "wide", config).check(ModelGeometry.from_hf_config(config))
