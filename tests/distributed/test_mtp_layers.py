"""Layers for multi-token prediction keep their bytes through training, a run's checkpoint and its export."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from support import trainer
from support.fp8_checkpoints import add_mtp_layer, find_changed, with_random_blocks
from support.golden import slow_fp8
from support.models import FP8, random_sequences, read_weights

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.align import Alignment
from megatron_rl.hf.files import read_config
from megatron_rl.hf.mtp_layers import MTPCopy, MTPLayers
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.mcore.checkpoint.folder import find_damage
from megatron_rl.mcore.weights.export import convert
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def models(model_folder, tmp_path_factory):
    """Maps a name to a checkpoint with such a layer, in BF16 or in FP8 with power-of-two scales, and the layer's tensors."""
    made = {}
    for name, family, scales in (("deepseek", "deepseek_v3", ""), ("glm", "glm4_moe_air", ""), ("fp8", "glm4_moe_air", "pow2")):
        folder = tmp_path_factory.mktemp(name) / "model"
        shutil.copytree(model_folder(family, **SMALL), folder)
        if scales:
            with_random_blocks(folder, scales, seed=3)
        made[name] = folder, add_mtp_layer(folder, scales)
    return made


@pytest.mark.parametrize("name", ["deepseek", "fp8"])
def test_a_trained_runs_export_holds_them_byte_for_byte(worlds, models, tmp_path, name):
    source, layer = models[name]
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


def test_ranks_share_the_files_of_a_copy(models, tmp_path):
    source, layer = models["glm"]
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


def test_another_precision_converts_their_decoder_as_it_does_the_others(models, tmp_path):
    source, layer = models["glm"]
    convert(source, tmp_path / "fp8", {"mode": "fp8_unified"})
    quantized = read_weights(tmp_path / "fp8")
    blocks = [name for name in layer if f"{name}_scale_inv" in quantized]
    assert len(blocks) == 4 + 3 * 9
    for name in blocks[:6]:
        codes, scales = slow_fp8.quantize_matrix(layer[name].float().numpy(), "pow2")
        assert np.array_equal(quantized[name].view(torch.uint8).numpy(), codes)
        assert np.array_equal(quantized[f"{name}_scale_inv"].numpy(), scales)
    assert sorted(find_changed(layer, quantized)) == sorted(blocks)

    source, layer = models["fp8"]
    convert(source, tmp_path / "bf16", {"mode": "bf16"})
    values = read_weights(tmp_path / "bf16")
    assert not any(name.endswith("_scale_inv") for name in values)
    for name in blocks:
        expected = dequantize_weight(QuantizedWeight(layer[name], layer[f"{name}_scale_inv"])).bfloat16()
        assert torch.equal(values[name], expected), name
    rest = {name: tensor for name, tensor in layer.items() if name.removesuffix("_scale_inv") not in blocks}
    assert len(rest) == 6 + 4 and find_changed(rest, values) == []


def test_scales_that_the_result_could_not_have_are_made_anew(models, model_folder, tmp_path):
    """With `fp8_rollout`, blocks whose scales are not powers of two are quantized again to blocks whose scales are."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder("glm4_moe_air", **SMALL), folder)
    layer = add_mtp_layer(with_random_blocks(folder, "fp32", seed=3), "fp32")
    config, name = read_config(folder), "model.layers.2.self_attn.q_proj.weight"
    layers = MTPLayers(HFCheckpoint(folder, config), ModelGeometry.from_hf_config(config))
    for scales in ("fp32", "pow2"):
        contract = PrecisionContract.from_config(PrecisionConfig(mode="fp8_rollout", scale_format=scales))
        stored = layers.read(name, contract)
        assert sum(tensor.nbytes for tensor in stored.values()) == layers.count_bytes(contract)[name]
        assert (find_changed({name: layer[name]}, stored) == []) == (scales == "fp32")
        assert bool((torch.frexp(stored[f"{name}_scale_inv"]).mantissa == 0.5).all()) == (scales == "pow2")


def test_a_wider_model_has_none(models, tmp_path):
    convert(models["glm"][0], tmp_path / "same", {"mode": "bf16"}, Alignment(128))
    assert find_changed(models["glm"][1], read_weights(tmp_path / "same")) == []
    convert(models["glm"][0], tmp_path / "wide", {"mode": "bf16"}, Alignment(512))
    config = read_config(tmp_path / "wide")
    assert config["num_nextn_predict_layers"] == 0 and config["hidden_size"] == 512
    assert not any(name.startswith("model.layers.2.") for name in read_weights(tmp_path / "wide"))
    HFCheckpoint(tmp_path / "wide", config).check(ModelGeometry.from_hf_config(config))
