"""Exports of wrappers: the decoder is converted, the vision tower and untrained layers are kept, and stacked experts are read."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.families import ARCHITECTURES
from support.models import make_model, read_weights
from typer.testing import CliRunner

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.cli.main import app
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_tensors
from parallel.wrappers import rewrap

KINDS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def wrap(kind):
    """Return the config.json of a wrapper of a tiny decoder."""
    text = {**ARCHITECTURES[KINDS[kind]], "mtp_num_hidden_layers": 1, "num_hidden_layers": 2}
    own = {"architectures": ["Wrapper"], "model_type": kind, "image_token_id": 7, "vision_config": {"depth": 1}, "torch_dtype": "bfloat16"}
    return {**own, "tie_word_embeddings": False, "text_config": text}


def make_wrapper(folder, kind, stacked=True):
    """Write a wrapper's checkpoint in BF16 with a vision tower and an MTP layer; experts as transformers 5 stores them, or one by one."""
    config = wrap(kind)
    make_byte_tokenizer(folder)
    make_model(folder, config)
    tensors = {name: value.bfloat16() for name, value in read_weights(folder).items()}
    generator = torch.Generator().manual_seed(1)
    extra = {tensor.name: tensor.shape for tensor in list_mtp_tensors(ModelGeometry.from_hf_config(config)).values()}
    extra |= {"model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4), "model.visual.merger.norm.bias": (8,)}
    tensors |= {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in extra.items()}
    save_file(stack_experts(tensors) if stacked else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stack_experts(tensors):
    stacks, rest = {}, {}
    for name, value in tensors.items():
        layer, found, part = name.partition(".mlp.experts.")
        if found:
            number, part, _ = part.split(".")
            stacks.setdefault(f"{layer}.mlp.experts.", {}).setdefault(int(number), {})[part] = value
        else:
            rest[name] = value
    for layer, experts in stacks.items():
        own = [experts[number] for number in range(len(experts))]
        rest[layer + "gate_up_proj"] = torch.stack([torch.cat([each["gate_proj"], each["up_proj"]]) for each in own])
        rest[layer + "down_proj"] = torch.stack([each["down_proj"] for each in own])
    return rest


def export(source, output, precision="bf16"):
    result = CliRunner().invoke(app, ["export", "--checkpoint", str(source), "--output", str(output), "--precision", precision])
    assert result.exit_code == 0, result.stderr
    return result.stdout, read_weights(output), json.loads((output / "config.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_keeps_what_is_not_trained_and_stays_a_wrapper(tmp_path, kind):
    source = make_wrapper(tmp_path / "source", kind)
    apart = make_wrapper(tmp_path / "apart", kind, stacked=False)
    printed, results, config = export(source, tmp_path / "bf16")
    assert "the vision tower is not trained" in printed and "multi-token prediction" in printed
    stored, single = read_weights(source), read_weights(apart)
    for name, value in results.items():
        expected = single.get(name, stored.get(name))
        expected = expected.float() if name.endswith(("A_log", "dt_bias")) else expected
        assert value.dtype == expected.dtype and torch.equal(value, expected), name
    assert {name for name in results if "visual" in name} == {name for name in stored if "visual" in name} != set()
    assert {name for name in results if name.startswith("mtp.")} == {name for name in stored if name.startswith("mtp.")} != set()
    assert results["model.language_model.layers.0.linear_attn.conv1d.weight"].dim() == 3
    assert (config["model_type"], config["vision_config"], config["image_token_id"]) == (kind, {"depth": 1}, 7)
    assert config["text_config"].items() >= {**wrap(kind)["text_config"], "tie_word_embeddings": False}.items()
    assert ModelGeometry.from_hf_config(config) == ModelGeometry.from_hf_config(wrap(kind))
    read = HFCheckpoint(tmp_path / "bf16", read_config(tmp_path / "bf16"))
    read.check(ModelGeometry.from_hf_config(config))


def test_an_export_in_fp8_quantizes_the_decoder_alone(tmp_path):
    _, results, config = export(make_wrapper(tmp_path / "source", "qwen3_5"), tmp_path / "fp8", "fp8")
    quantized = {name.removesuffix("_scale_inv") for name in results if name.endswith("_scale_inv")}
    layers = {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-2] for name in quantized} == layers
    assert all(results[name].dtype == torch.bfloat16 for name in results if "visual" in name)
    settings = config["quantization_config"]
    assert "quantization_config" not in config["text_config"] and {"in_proj_a", "visual"} <= set(settings["modules_to_not_convert"])
    _, results, _ = export(tmp_path / "fp8", tmp_path / "back")
    assert not any(name.endswith("_scale_inv") for name in results)


@pytest.mark.parametrize("change, words", [
    (lambda tensors: tensors.update({"model.visual.x": torch.zeros(1), "visual.x": torch.zeros(1)}), "tensor visual.x does not belong"),
    (lambda tensors: tensors.pop("model.language_model.layers.1.mlp.experts.down_proj"), "experts.0.down_proj.weight is missing"),
    (lambda tensors: tensors.update({name: value[1:] for name, value in tensors.items() if name.endswith("experts.down_proj")}),
     r"experts.down_proj has shape \[3, 256, 256\], config.json says 4 experts"),
    (lambda tensors: tensors.update({name: value[:, 0] for name, value in tensors.items() if name.endswith("conv1d.weight")}),
     r"conv1d.weight has shape \[1024, 4\], config.json says \[1024, 1, 4\]"),
])  # fmt: skip
def test_tensors_of_wrappers_are_checked(tmp_path, change, words):
    folder = make_wrapper(tmp_path, "qwen3_5_moe")
    tensors = read_weights(folder)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = read_config(folder)
    with pytest.raises(UserError, match=words):
        HFCheckpoint(folder, config).check(ModelGeometry.from_hf_config(config))


def test_a_text_model_is_no_wrapper():
    config = ARCHITECTURES["qwen3_5_text"]
    assert rewrap(config, config) == config
