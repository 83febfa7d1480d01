"""gpt-oss's stacked experts: parts are read from stacks, in BF16 and MXFP4, and written as stacks that transformers loads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import transformers_reference
from support.families import ARCHITECTURES
from support.models import edit_config, make_model

from megatron_rl.errors import UserError
from megatron_rl.hf.checkpoint_format import find_checkpoint_format
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.mcore.checkpoint.export import convert
from parallel.model_geometry import ModelGeometry
from parallel.shards import Rect, Region, take_all

CONFIG = ARCHITECTURES["gpt_oss"] | {"num_hidden_layers": 2, "intermediate_size": 64, "hidden_size": 128, "num_attention_heads": 2}
MATRICES = ("gate_up_proj", "down_proj")
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "model", CONFIG)


def to_mxfp4(folder):
    """Replace the stacks by random MXFP4. Return the values of each stack [E, out, in], computed number by number."""
    file, numbers = folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors, values = load_file(file), {}
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=numbers, dtype=torch.uint8)
        scales = torch.randint(115, 124, (experts, outputs, inputs // 32), generator=numbers, dtype=torch.uint8)
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
        exact = []
        for byte, scale in zip(blocks.flatten().tolist(), scales.flatten().repeat_interleave(16).tolist(), strict=True):
            exact += [(-1) ** (code >> 3) * FP4[code & 7] * 2.0 ** (scale - 127) for code in (byte & 15, byte >> 4)]
        values[name] = torch.tensor(exact).view(experts, outputs, inputs)
    save_file(tensors, file, {"format": "pt"})
    edit_config(folder, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}})
    return values


def test_transformers_loads_what_is_written_and_parts_are_its_experts(folder):
    model, checkpoint = ModelGeometry.from_hf_config(CONFIG), HFCheckpoint(folder, CONFIG)
    checkpoint.check(model)
    experts = transformers_reference.load(folder).model.layers[1].mlp.experts
    for name, tensor in model.tensors().items():
        if name.startswith("model.layers.1.mlp.experts.gate_up_proj."):
            assert torch.equal(checkpoint.read_values(take_all(tensor)), experts.gate_up_proj[int(name[-1])].t())
        if name.startswith("model.layers.1.mlp.experts.down_proj_bias."):
            assert torch.equal(checkpoint.read_values(take_all(tensor)), experts.down_proj_bias[int(name[-1])])


def test_mxfp4_is_dequantized_exactly_and_exported_as_bf16(folder, tmp_path):
    values = to_mxfp4(folder)
    config = read_config(folder)
    assert find_checkpoint_format(config) is None
    model, checkpoint = ModelGeometry.from_hf_config(config), HFCheckpoint(folder, config)
    checkpoint.check(model)
    for name, stack in values.items():
        for expert, whole in enumerate(stack):
            tensor = model.tensors()[f"{name}.{expert}"]
            assert torch.equal(checkpoint.read_values(take_all(tensor)).float(), whole)
            part = Rect(3, 7, 20, 41)  # cuts groups of 32
            assert torch.equal(checkpoint.read_values(Region(tensor, part)).float(), whole[3:23, 7:48])
    convert(folder, tmp_path / "out", {"mode": "bf16", "high": "bf16"}, file_bytes=1 << 15)
    exported = HFCheckpoint(tmp_path / "out", read_config(tmp_path / "out"))
    assert "quantization_config" not in read_config(tmp_path / "out") and len(set(exported._file_of.values())) > 2
    for name, stack in values.items():
        assert torch.equal(exported.read_stored(name).float(), stack.transpose(1, 2))
    ids = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
    assert transformers_reference.logits(tmp_path / "out", ids).isfinite().all()


@pytest.mark.parametrize("change", ["a scale tensor is missing", "another number of experts", "fp8"])
def test_what_does_not_fit_is_refused_by_name(folder, tmp_path, change):
    to_mxfp4(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if change == "fp8":
        with pytest.raises(UserError, match="--precision.*attention with sinks"):
            convert(folder, tmp_path / "out", {"mode": "fp8_rollout"})
        return
    name = "model.layers.0.mlp.experts.down_proj_scales"
    if change.startswith("a scale"):
        del tensors[name]
    else:
        tensors = {each: value[:3].contiguous() if each.endswith(("_blocks", "_scales")) else value for each, value in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(UserError, match="down_proj"):
        HFCheckpoint(folder, config).check(ModelGeometry.from_hf_config(config))
