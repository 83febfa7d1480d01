"""`export` of a Hugging Face checkpoint: FP8 blocks are dequantized to BF16; high precision is quantized by the contract."""

import os
import re
import resource
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fp8_checkpoints import make_fp8_checkpoint
from support.golden import slow_fp8
from support.models import make_checkpoint, read_weights
from typer.testing import CliRunner

from megatron_rl.cli.main import app
from megatron_rl.hf.checkpoint_format import find_checkpoint_format
from megatron_rl.hf.files import list_kept_files, read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.int8 import quantize_int8_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import FP8, INT8
from parallel.model_geometry import ModelGeometry


def export(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, (result.stdout if result.exit_code == 0 else result.stderr).rstrip()


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_fp8_to_bf16(tmp_path, scales):
    source, output = make_fp8_checkpoint(tmp_path / "fp8", scales), tmp_path / "bf16"
    assert export("--checkpoint", source, "--output", output) == (0, f"checkpoint: {output}")
    blocks, results = read_weights(source), read_weights(output)
    assert results.keys() == {name for name in blocks if not name.endswith("_scale_inv")}
    for name, tensor in results.items():
        expected = blocks[name]
        if expected.dtype == torch.float8_e4m3fn:
            scale = np.kron(blocks[name + "_scale_inv"].numpy().astype(np.float64), np.ones((128, 128)))
            values = slow_fp8.from_codes(expected.view(torch.uint8).numpy()) * scale
            expected = torch.from_numpy(values.astype(np.float32)).bfloat16()
        assert torch.equal(tensor, expected) and tensor.dtype == torch.bfloat16, name
    config = read_config(output)
    assert not find_checkpoint_format(config) and config["torch_dtype"] == "bfloat16"
    HFCheckpoint(output, config).check(ModelGeometry.from_hf_config(config))
    assert {file.name for file in list_kept_files(output)} == {file.name for file in list_kept_files(source)} != set()


def test_high_precision_to_fp8_and_back(tmp_path):
    source, output = make_checkpoint(tmp_path / "fp32"), tmp_path / "fp8"
    assert export("--checkpoint", source, "--output", output, "--precision", "fp8")[0] == 0
    weights, results, config = read_weights(source), read_weights(output), read_config(output)
    assert config["quantization_config"]["scale_fmt"] == "ue8m0" and config["torch_dtype"] == "float32"
    checkpoint, model = HFCheckpoint(output, config), ModelGeometry.from_hf_config(config)
    checkpoint.check(model)
    checkpoint.check_scales(model.tensors().values(), FP8.with_scales("pow2"))
    for name, tensor in weights.items():
        if name + "_scale_inv" in results:
            codes, scales = slow_fp8.quantize_matrix(tensor.numpy(), "pow2")
            assert np.array_equal(results[name].view(torch.uint8).numpy(), codes)
            assert np.array_equal(results[name + "_scale_inv"].numpy(), scales)
        else:
            assert torch.equal(results[name], tensor), name
    assert sum(name.endswith("_scale_inv") for name in results) == 7
    # round trip: BF16 holds every value of a block with pow2 scales; bytes may double at half the scale if a maximum was rounded to 224
    for checkpoint, target, precision in (("fp8", "bf16", "bf16"), ("bf16", "again", "fp8")):
        assert export("--checkpoint", tmp_path / checkpoint, "--output", tmp_path / target, "--precision", precision)[0] == 0
    again = read_weights(tmp_path / "again")
    for name in again:
        if name + "_scale_inv" in again:
            values = [dequantize_weight(QuantizedWeight(blocks[name], blocks[name + "_scale_inv"])) for blocks in (results, again)]
            assert torch.equal(*values), name
    assert again.keys() == results.keys()


def test_refusals(tmp_path):
    source = make_fp8_checkpoint(tmp_path / "fp8")
    code, line = export("--checkpoint", source, "--output", tmp_path / "out", "--precision", "fp4")
    assert code == 2 and line.endswith("--precision = 'fp4': must be one of bf16, fp8, int8; choose one")
    code, line = export("--checkpoint", source, "--output", tmp_path / "out", "--precision", "fp8")
    assert code == 2 and "is quantized to FP8 already and cannot be quantized again; use --precision bf16" in line
    code, line = export("--checkpoint", source, "--output", source)
    assert code == 2 and "exists already" in line
    (source / "model.safetensors").unlink()
    code, line = export("--checkpoint", source, "--output", tmp_path / "out")
    assert (code, line.startswith("megatron-rl: --checkpoint = ")) == (2, True) and "holds neither model.safetensors" in line
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_reported_in_one_line_and_nothing_is_left_behind(tmp_path, monkeypatch):
    source, output = make_checkpoint(tmp_path / "fp32"), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        code, line = export("--checkpoint", source, "--output", output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 3 and "File too large" in line and "model.safetensors)" in line and "\n" not in line
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    code, line = export("--checkpoint", source, "--output", output)
    assert code == 3 and re.search(r"\d MiB are needed, but only 0 MiB are free", line), line
    assert os.listdir(tmp_path) == ["fp32"]


def test_high_precision_to_int8_and_back(tmp_path):
    source, quantized, output = make_checkpoint(tmp_path / "fp32"), tmp_path / "int8", tmp_path / "bf16"
    assert export("--checkpoint", source, "--output", quantized, "--precision", "int8")[0] == 0
    assert export("--checkpoint", quantized, "--output", output)[0] == 0
    bytes_and_scales, results = read_weights(quantized), read_weights(output)
    for name, tensor in read_weights(source).items():
        if (scale := bytes_and_scales.get(INT8.scale_name(name))) is not None:
            data, wanted = quantize_int8_weight(tensor)
            assert torch.equal(bytes_and_scales[name], data) and torch.equal(scale, wanted)
            tensor = data.float() * wanted
        assert torch.equal(results[name], tensor.bfloat16()), name
    line = "is quantized to INT8 already and cannot be quantized again; use --precision bf16"
    assert line in export("--checkpoint", quantized, "--output", tmp_path / "twice", "--precision", "fp8")[1]
