"""Reading checkpoints: valid ones in every published form, and a one-line refusal that names the tensor or file for all others."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import ENGINE_ARCHITECTURES
from support.fp8_checkpoints import SETTINGS, list_tensors, make_fp8_checkpoint, split, write_sparse_safetensors
from support.largest_tensor import LargestTensor
from support.models import edit_config, make_checkpoint

from megatron_rl.errors import UserError
from megatron_rl.hf import read
from megatron_rl.hf.checkpoint_format import find_checkpoint_format
from megatron_rl.hf.files import INDEX, read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import FORMATS, FP8
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_tensors
from parallel.shards import Rect, Region, take_all

GATE, NORM, HEAD = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SCALES = GATE + "_scale_inv"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A high-precision (FP32) and an FP8 checkpoint. Tests must not change them."""
    return {"high": make_checkpoint(tmp_path_factory.mktemp("high")), "fp8": make_fp8_checkpoint(tmp_path_factory.mktemp("fp8"))}


@pytest.fixture
def folder(request, checkpoints, tmp_path):
    """A copy of a checkpoint that a test may change. The test parametrizes `folder` indirectly with its name."""
    return Path(shutil.copytree(checkpoints[request.param], tmp_path / "model"))


high, both = (pytest.mark.parametrize("folder", which, indirect=True) for which in (["high"], ["high", "fp8"]))


def opened(folder: Path) -> HFCheckpoint:
    return HFCheckpoint(folder, read_config(folder))


def geometry(folder: Path) -> ModelGeometry:
    return ModelGeometry.from_hf_config(read_config(folder))


def check(folder: Path) -> None:
    checkpoint, model = opened(folder), geometry(folder)
    checkpoint.check(model)
    checkpoint.check_scales(model.tensors().values(), FP8.with_scales("pow2"))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check(folder)
    line = str(caught.value)
    assert line.startswith("model.path = ") and str(folder) in line and "\n" not in line and caught.value.fix
    return line


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors, or remove those that are None."""
    weights = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")


def make_tied(folder: Path) -> Path:
    """Return a copy of a split checkpoint as one file whose output layer equals the embedding."""
    weights = {name: tensor for file in folder.glob("model-*") for name, tensor in load_file(file).items()}
    (tied := folder.parent / "tied").mkdir()
    save_file({**weights, HEAD: weights[EMBEDDING].clone()}, tied / "model.safetensors")
    return tied


@both
def test_a_good_checkpoint_passes_in_one_file_or_in_several(folder):
    """`check` raises if anything is wrong. It ignores buffers, and a copy of the embedding if the model is tied; each is named."""
    check(folder)
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(64), "model.rotary_emb.inv_freq": torch.zeros(64)})
    check(folder)
    assert opened(folder).describe_unread(geometry(folder)) == [
        f"not read from {folder}: model.layers.0.self_attn.rotary_emb.inv_freq, model.rotary_emb.inv_freq: "
        "config.json determines the rotary frequencies"
    ]
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": None, "model.rotary_emb.inv_freq": None})
    check(split(folder, 3))
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    edit_config(folder, {"tie_word_embeddings": True})
    assert f"tensor {HEAD} differs from {EMBEDDING}, of which config.json makes it a copy; set tie_word_embeddings" in refused(folder)
    shutil.copy(folder / "config.json", tied := make_tied(folder))
    check(tied)
    reasons = [line.partition(f"{tied}: ")[2] for line in opened(tied).describe_unread(geometry(tied))]
    assert reasons == [f"{HEAD}: it equals the embedding, to which tie_word_embeddings ties it"]
    assert "consolidated.safetensors: not model.safetensors, nor named by" in opened(folder).describe_unread(geometry(folder))[-1]
    assert not find_checkpoint_format({}) and not find_checkpoint_format({"quantization_config": None})
    assert find_checkpoint_format({"quantization_config": {**SETTINGS, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}})


WRONG = [
    (NORM, None, f"tensor {NORM} is missing"),
    (GATE, torch.zeros(2, 2), f"tensor {GATE} has shape [2, 2], config.json says [512, 256]"),
    (NORM, torch.zeros(256, 1), f"tensor {NORM} has shape [256, 1], config.json says [256]"),
    (NORM, torch.zeros(256, dtype=torch.int32), f"tensor {NORM} is I32, must be BF16 or F16 or F32"),
    (NORM, torch.zeros(256, dtype=torch.float64), f"tensor {NORM} is F64, must be"),
    (NORM, torch.zeros(256).to(torch.float8_e4m3fn), f"tensor {NORM} is F8_E4M3, must be BF16 or"),
    ("model.layers.1.mlp.up_proj.weight", torch.zeros(1), "model.layers.1.mlp.up_proj.weight does not belong to the qwen3 model"),
    ("model.layers.0.self_attn.q_proj.bias", torch.zeros(256), "tensor model.layers.0.self_attn.q_proj.bias does not belong to"),
    (NORM + "_scale_inv", torch.ones(2, 1), f"tensor {NORM}_scale_inv does not belong to"),
]
WRONG_FP8 = [
    (SCALES, None, f"tensor {SCALES} is missing"),
    (SCALES, torch.ones(4, 1), f"tensor {SCALES} has shape [4, 1], config.json says [4, 2]"),
    (SCALES, torch.ones(4, 2, dtype=torch.float16), f"tensor {SCALES} is F16, must be F32 or BF16; convert it"),
    (GATE, torch.zeros(512, 256), f"tensor {GATE} is F32, must be F8_E4M3; FP8 must be all weights of attention, MLP and experts"),
    (HEAD, torch.zeros(384, 256).to(torch.float8_e4m3fn), f"tensor {HEAD} is F8_E4M3, must be BF16 or F16 or F32; FP8 must be"),
    (SCALES, torch.full((4, 2), float("nan")), f"tensor {SCALES} holds a scale that is inf, NaN or not positive"),
    (SCALES, torch.full((4, 2), float("inf")), f"tensor {SCALES} holds a scale that is inf, NaN or not positive"),
    (SCALES, torch.full((4, 2), -1.0), f"tensor {SCALES} holds a scale that is inf, NaN or not positive"),
    (SCALES, torch.full((4, 2), 1e38), f"tensor {SCALES} holds a scale that is inf, NaN or not positive"),
    (SCALES, torch.full((4, 2), 0.75), f'tensor {SCALES} holds scales that are not powers of two, precision.scale_format is "pow2"'),
]


@pytest.mark.parametrize(
    "folder, name, tensor, line",
    [(kind, *case) for kind in ("high", "fp8") for case in WRONG] + [("fp8", *case) for case in WRONG_FP8],
    indirect=["folder"],
)
def test_wrong_tensors_are_refused(folder, name, tensor, line):
    change(folder, **{name: tensor})
    assert line in refused(folder)


@pytest.mark.parametrize("folder", ["fp8"], indirect=True)
def test_scales_of_weights_that_are_quantized_again_may_be_any(folder):
    change(folder, **{SCALES: torch.full((4, 2), 0.75)})
    opened(folder).check_scales(geometry(folder).tensors().values(), replace(FP8, name="groups", scale_format="pow2"))


@high
@pytest.mark.parametrize("settings, line", [
    ({**SETTINGS, "quant_method": "gptq"}, "quant_method = 'gptq': is not supported, only fp8 or w8a8_int8 is"),
    ({**SETTINGS, "weight_block_size": None}, "weight_block_size = 'None': is not supported, only [128, 128] is"),
    ({**SETTINGS, "weight_block_size": [64, 64]}, "weight_block_size = '[64, 64]': is not supported"),
    ({**SETTINGS, "activation_scheme": "static"}, "activation_scheme = 'static': is not supported"),
    ({**SETTINGS, "fmt": "e5m2"}, "fmt = 'e5m2': is not supported"),
    ("fp8", "quant_method = 'None': is not supported"),
])  # fmt: skip
def test_unsupported_quantization_is_refused(folder, settings, line):
    edit_config(folder, {"quantization_config": settings})
    with pytest.raises(UserError) as caught:
        check(folder)
    assert str(caught.value).startswith(f"config.json quantization_config.{line}") and "\n" not in str(caught.value)


def test_settings_choose_between_formats_with_the_same_method(monkeypatch):
    groups = replace(FP8, name="groups", quantization=(("quant_method", "fp8"), ("weight_block_size", (1, 32))), scale_format="e8m0")
    monkeypatch.setitem(FORMATS, "groups", groups)
    found = [find_checkpoint_format({"quantization_config": {**SETTINGS, "weight_block_size": size}}) for size in ([128, 128], [1, 32])]
    assert found == [FP8.with_scales("fp32"), groups]
    with pytest.raises(UserError, match=r"weight_block_size = '\[64, 64\]': is not supported"):
        find_checkpoint_format({"quantization_config": {**SETTINGS, "weight_block_size": [64, 64]}})


@high
def test_damaged_files_are_refused(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for cut in (0, 5, 200, -1):  # empty, no length, half a header, a byte short
        file.write_bytes(whole[:cut])
        line = refused(folder)
        assert str(file) in line and "cannot be read" in line and "truncated" in line
    file.write_bytes(b"<html>not found</html>" * 100)
    assert "cannot be read" in refused(folder)
    file.unlink()
    assert "holds neither model.safetensors nor its index" in refused(folder)
    file.write_bytes(whole)
    change(folder, **{GATE: torch.zeros(512, 256).to(torch.float8_e4m3fn), SCALES: torch.ones(4, 2)})
    assert f"tensor {GATE} is F8_E4M3, must be BF16 or F16 or F32; config.json has no quantization_config" in refused(folder)


@high
def test_wrong_indexes_are_refused(folder):
    split(folder)
    index, first = folder / INDEX, folder / "model-00000.safetensors"
    good = json.loads(index.read_text())
    other = {**good["weight_map"], GATE: "model-00007.safetensors"}
    index.write_text(json.dumps({"weight_map": other}))
    assert f"{INDEX}': names model-00007.safetensors, which is missing" in refused(folder)
    swapped = {name: "model-00000.safetensors" for name in good["weight_map"]} | {NORM: "model-00001.safetensors"}
    index.write_text(json.dumps({"weight_map": swapped}))
    assert f"{INDEX} says that model-0000" in refused(folder) and "but it does not" in refused(folder)
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}', "{}"):
        index.write_text(text)
        assert f"{INDEX}': is not a safetensors index" in refused(folder)
    index.write_text(json.dumps(good))
    check(folder)
    save_file({**load_file(first), **load_file(folder / "model-00001.safetensors")}, first)
    assert "is in model-00000.safetensors and in model-00001.safetensors" in refused(folder)


def test_mtp_layers_match_the_config(tmp_path):
    """All MTP layers, or only their copies of embedding and output layer, may be missing. Present tensors must match config.json."""
    plain = ENGINE_ARCHITECTURES["deepseek_v3"]
    config = {**plain, "num_nextn_predict_layers": 1}
    model, plain = ModelGeometry.from_hf_config(config), list_tensors(plain, "BF16")
    layer = {tensor.name: ("BF16", list(tensor.shape)) for tensor in list_mtp_tensors(model).values()}
    copies, last = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"), "model.layers.2.eh_proj.weight"
    wrong = ("BF16", [256, 256])

    def check(tensors):
        write_sparse_safetensors(tmp_path / "model.safetensors", tensors)
        HFCheckpoint(tmp_path, config).check(model)

    assert layer.keys() > {*copies, last, "model.layers.2.mlp.experts.1.down_proj.weight", "model.layers.2.self_attn.kv_b_proj.weight"}
    for left_out in (layer, copies, ()):
        check(plain | {name: header for name, header in layer.items() if name not in left_out})
    for change, message in (
        ({last: None}, r"tensor model\.layers\.2\.eh_proj\.weight is missing"),
        ({last: wrong}, r"tensor model\.layers\.2\.eh_proj\.weight has shape \[256, 256\], config\.json says \[256, 512\]"),
        ({copies[0]: wrong}, r"embed_tokens\.weight has shape \[256, 256\], config\.json says \[384, 256\]"),
        ({last: ("F8_E4M3", [256, 512])}, r"eh_proj\.weight is F8_E4M3, must be BF16 or F16 or F32"),
        ({"model.layers.2.shared_head.bias": wrong}, r"model\.layers\.2\.shared_head\.bias does not belong to the deepseek_v3 model"),
        ({"model.layers.3.eh_proj.weight": wrong}, r"tensor model\.layers\.3\.eh_proj\.weight does not belong to the deepseek_v3 model"),
    ):
        with pytest.raises(UserError, match=message):
            check({name: header for name, header in (plain | layer | change).items() if header})
    stored = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, (_, shape) in (plain | layer).items()}
    stored[copies[1]][-1, -1] = 1
    save_file(stored, tmp_path / "model.safetensors")
    HFCheckpoint(tmp_path, config).check(model)  # it is kept
    with pytest.raises(UserError, match=r"layers\.2\.shared_head\.head\.weight differs from lm_head\.weight, of which"):
        HFCheckpoint(tmp_path, config).check(replace(model, trains_mtp=True))  # it would be replaced


def test_rectangles_of_values_and_of_blocks(checkpoints):
    tensor, checkpoint = geometry(checkpoints["fp8"]).tensors()[GATE], opened(checkpoints["fp8"])
    weights = load_file(checkpoints["fp8"] / "model.safetensors")
    values = dequantize_weight(QuantizedWeight(weights[GATE], weights[SCALES]))
    assert torch.equal(checkpoint.read_values(take_all(tensor)), values)
    uneven = Region(tensor, Rect(100, 37, 200, 150))  # cuts blocks
    assert torch.equal(checkpoint.read_values(uneven), values[100:300, 37:187])
    data, scale = checkpoint.read_blocks(Region(tensor, Rect(128, 128, 256, 128)))
    assert torch.equal(data.view(torch.uint8), weights[GATE][128:384, 128:256].view(torch.uint8))
    assert torch.equal(scale, weights[SCALES][1:3, 1:2])


@both
def test_infinities_and_nans_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    broken, tensor = weights[GATE].clone(), geometry(folder).tensors()[GATE]
    broken.view(torch.uint8)[400, -4:] = torch.tensor([0x00, 0x00, 0x80, 0x7F])  # FP32 +inf; its last byte is the E4M3 NaN
    change(folder, **{GATE: broken})
    checkpoint = opened(folder)
    checkpoint.read_values(Region(tensor, Rect(0, 0, 384, 256)))  # a part that other ranks read
    for take in (checkpoint.read_values, *([checkpoint.read_blocks] if checkpoint.format else [])):
        with pytest.raises(UserError, match="gate_proj.weight holds inf or NaN; the checkpoint is damaged"):
            take(take_all(tensor))


class Counted:
    """Replaces `safe_open` and records the opened files and the bytes read from each tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files, self.bytes = set[str](), Counter[str]()
        monkeypatch.setattr(read, "safe_open", self.open)

    def open(self, path: Path, framework: str) -> SimpleNamespace:
        self.files.add(path.name)
        file = safe_open(path, framework=framework)

        def get_slice(name: str) -> object:
            view = file.get_slice(name)

            def take(_: object, index: Any) -> torch.Tensor:
                self.bytes[name] += view[index].nbytes
                return view[index]

            return type("View", (), {"get_shape": view.get_shape, "get_dtype": view.get_dtype, "__getitem__": take})()

        return SimpleNamespace(keys=file.keys, get_slice=get_slice)


@both
def test_a_rank_reads_only_its_bytes_with_a_bounded_buffer(folder, monkeypatch):
    """It opens only the needed files of 3, and reads strips of 128 rows: no temporary tensor is larger than a strip."""
    split(folder, 3)
    counted, model = Counted(monkeypatch), geometry(folder)
    monkeypatch.setattr(read, "_STRIP", 1 << 12)
    checkpoint = opened(folder)
    assert counted.files == set()
    tensor = model.tensors()[GATE]
    half = Region(tensor, Rect(0, 128, 512, 128))
    into = torch.empty(512, 128)
    expected = dict.fromkeys([GATE], 512 * 128 * 4)
    if checkpoint.format:
        expected = {GATE: 512 * 128, SCALES: 4 * 4}
    with LargestTensor() as largest:
        checkpoint.read_into(half, into)
    assert counted.bytes == expected and len(counted.files) <= len(expected) < 3
    assert largest.numel == 128 * 128
    weights = {name: safe_open(checkpoint._file_of[name], "pt").get_tensor(name) for name in expected}
    values = dequantize_weight(QuantizedWeight(weights[GATE], weights[SCALES])) if checkpoint.format else weights[GATE]
    assert torch.equal(into, values[:, 128:])


@high
def test_a_truncated_file_is_named_before_anything_is_read(folder, monkeypatch):
    split(folder, 3)
    torn = folder / "model-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    counted = Counted(monkeypatch)
    line = refused(folder)
    assert str(torn) in line and "truncated" in line and not counted.bytes
    checkpoint = opened(folder)  # without `check`, other files can be read
    name = next(name for name, file in checkpoint._file_of.items() if file == torn)
    with pytest.raises(UserError, match="model-00001.safetensors': cannot be read"):
        checkpoint.read_values(take_all(geometry(folder).tensors()[name]))
