"""A Hugging Face checkpoint imported into a layout and exported again is the same bytes, FP8 blocks with their scales included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import fp8_checkpoints
from support.families import ARCHITECTURES
from support.fp8_checkpoints import different, make_fp8_checkpoint, split, with_random_blocks
from support.golden import slow_fp8
from support.models import make_checkpoint, make_model, random_sequences, read_weights

from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.families import FAMILIES
from parallel.formats import FP8
from parallel.layout import Layout

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)]
WIDTHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "narrow": {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4},  # blocks lie in another order than Megatron's rows
}
LAYERS = ["mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv"]
NAMES = sorted(f"decoder.layers.{layer}.{name}" for layer in range(2) for name in LAYERS)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """Makes the FP8 checkpoint of some widths and scales, once each."""
    made: dict[tuple[str, str], Path] = {}

    def get(widths: str, scales: str = "pow2") -> Path:
        if (widths, scales) not in made:
            made[widths, scales] = make_fp8_checkpoint(tmp_path_factory.mktemp("fp8"), scales, num_hidden_layers=2, **WIDTHS[widths])
        return made[widths, scales]

    return get


def unified(scale_format: str = "pow2") -> dict[str, Any]:
    return {"mode": "fp8_unified", "scale_format": scale_format, "high": "bf16"}


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """float32 values of an FP8 checkpoint, from the definition of the format."""
    tensors = {}
    for name, tensor in read_weights(folder).items():
        if tensor.dtype == torch.float8_e4m3fn:
            values = slow_fp8.from_codes(tensor.view(torch.uint8).numpy())
            scale = read_weights(folder)[FP8.scale_name(name)].numpy().astype(np.float64)
            rows, cols = values.shape
            tensors[name] = torch.from_numpy((values * np.kron(scale, np.ones((128, 128)))[:rows, :cols]).astype(np.float32))
        elif not name.endswith("_scale_inv"):
            tensors[name] = tensor.float()
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("widths, scales", [("plain", "pow2"), ("tied", "fp32"), ("narrow", "fp32"), ("narrow", "pow2")])
def test_an_fp8_checkpoint_comes_out_as_it_went_in(worlds, fp8, tmp_path, layout, widths, scales):
    """Its masters are the dequantised values."""
    folder = fp8(widths, scales)
    ranks = worlds(layout.world_size).call(fp8_checkpoints.import_and_export, folder, unified(scales), tmp_path / "out", layout)
    assert all(adopted == layers > 0 for adopted, layers, _ in ranks)
    assert different(folder, tmp_path / "out") == []
    assert len(read_weights(folder)) == 3 + 2 * (4 + 2 * 7) - (widths == "tied")
    assert_dequantized(folder, ranks[0][2])


def assert_dequantized(folder: Path, masters: dict[str, torch.Tensor]) -> None:
    expected = dequantized(folder)
    assert masters.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(masters[name], expected[name])] == []


def test_these_checkpoints_are_not_what_our_quantiser_would_make(worlds, fp8, tmp_path):
    """The tests above can fail: quantising the dequantised values again changes bytes and scales of every weight."""
    folder, again = fp8("plain"), tmp_path / "again"
    write_checkpoint(tmp_path, {**read_config(folder), "quantization_config": None}, dequantized(folder), folder)
    worlds(1).call(fp8_checkpoints.import_and_export, tmp_path, unified(), again)
    wrong = different(folder, again)
    assert {f"model.layers.0.{name}" for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight_scale_inv")} <= set(wrong)
    assert len(wrong) == 2 * 2 * 7


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=str)
def test_a_bf16_checkpoint_comes_out_as_it_went_in(worlds, tmp_path, layout):
    folder = make_checkpoint(tmp_path / "bf16", num_hidden_layers=2)
    save_file({name: tensor.bfloat16() for name, tensor in read_weights(folder).items()}, folder / "model.safetensors")
    worlds(layout.world_size).call(fp8_checkpoints.import_and_export, folder, {"mode": "bf16", "high": "bf16"}, tmp_path / "out", layout)
    assert different(folder, tmp_path / "out") == []


def test_several_files_with_an_index_are_the_same_checkpoint(worlds, fp8, tmp_path):
    whole, parts = fp8("plain"), make_fp8_checkpoint(tmp_path / "parts", num_hidden_layers=2)
    worlds(2).call(fp8_checkpoints.import_and_export, split(parts, 3), unified(), tmp_path / "out")
    assert different(whole, tmp_path / "out") == []


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
@pytest.mark.parametrize("precision", [{"mode": "bf16", "high": "fp32"}, {"mode": "fp8_rollout", "high": "fp32"}])
def test_a_trainer_without_fp8_starts_from_the_dequantized_values(worlds, fp8, layout, precision):
    folder = fp8("narrow")
    assert_dequantized(folder, worlds(layout.world_size).call(fp8_checkpoints.masters, folder, precision, layout)[0])


def test_an_engine_beside_a_high_precision_trainer_gets_the_same_values(worlds, fp8, tmp_path):
    """`fp8_rollout` quantises what the trainer holds: with pow2 scales other bytes where a block was not filled, but the same values."""
    folder = fp8("plain")
    worlds(1).call(fp8_checkpoints.import_and_export, folder, {"mode": "fp8_rollout", "high": "bf16"}, tmp_path / "out")
    served, expected = read_weights(tmp_path / "out"), dequantized(folder)
    assert different(folder, tmp_path / "out") != []
    for name, values in expected.items():
        if FP8.scale_name(name) in served:
            assert torch.equal(dequantize_weight(QuantizedWeight(served[name], served[FP8.scale_name(name)])), values), name


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("bf16"), num_hidden_layers=2, tie_word_embeddings=True, **WIDTHS["narrow"])
    save_file({name: tensor.bfloat16() for name, tensor in read_weights(folder).items()}, folder / "model.safetensors")
    return folder


SPREAD = [
    (unified(), Layout(tp=2, dp=2)),
    ({"mode": "fp8_rollout", "high": "fp32"}, Layout(tp=2)),
    ({"mode": "bf16", "high": "bf16"}, Layout(tp=2, dp=2)),
]


@pytest.mark.parametrize("precision, layout", SPREAD, ids=str)
def test_masters_are_the_same_in_any_layout_and_round_to_the_checkpoint(worlds, bf16, precision, layout):
    stored = read_weights(bf16)
    masters, served, exported = worlds(layout.world_size).call(fp8_checkpoints.spread_masters, bf16, precision, layout)[0]
    masters_of_one, *_ = worlds(1).call(fp8_checkpoints.spread_masters, bf16, precision)[0]
    _, served_naively, _ = worlds(1).call(fp8_checkpoints.spread_masters, bf16, {**precision, "masters": "stored"})[0]
    assert masters.keys() == masters_of_one.keys() == stored.keys() == exported.keys()
    for name, values in stored.items():
        assert torch.equal(masters[name], masters_of_one[name]), name
        assert torch.equal(masters[name].bfloat16(), values) and torch.equal(exported[name], values), name
        coarser = precision["high"] == "bf16" or name.endswith("_proj.weight")
        assert (float((masters[name] == values.float()).float().mean()) < 0.02) is coarser, name
    assert [name for name in served_naively if not torch.equal(served[name], served_naively[name])] == []


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_masters_of_an_fp8_checkpoint_are_the_same_in_any_layout_and_leave_its_blocks(worlds, fp8, layout):
    precision, folder = unified(), fp8("narrow")
    masters, served, _ = worlds(layout.world_size).call(fp8_checkpoints.spread_masters, folder, precision, layout)[0]
    masters_of_one, *_ = worlds(1).call(fp8_checkpoints.spread_masters, folder, precision)[0]
    assert [name for name in masters_of_one if not torch.equal(masters[name], masters_of_one[name])] == []
    for name, tensor in read_weights(folder).items():
        assert torch.equal(served[name], tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor.float()), name


@pytest.mark.parametrize("size, widths", [(1, "plain"), (2, "narrow")])
def test_the_first_optimizer_step_quantises_anew(worlds, fp8, size, widths):
    for layers in worlds(size).call(fp8_checkpoints.step, fp8(widths), unified(), random_sequences(4, seed=2), 1e-3):
        assert sorted(layers["all"]) == NAMES == sorted(layers["quantized"])
        assert layers["kept"] == []


def test_a_broken_value_on_one_rank_stops_every_rank(worlds, tmp_path):
    folder = make_fp8_checkpoint(tmp_path)
    weights = read_weights(folder)
    weights["model.layers.0.mlp.gate_proj.weight"].view(torch.uint8)[300, 3] = 0xFF  # rank 1 holds rows 256 to 511
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor model\.layers\.0\.mlp\.gate_proj\.weight holds inf or NaN"):
        worlds(2).call(fp8_checkpoints.masters, folder, unified())


def test_scales_that_are_no_powers_of_two_need_another_scale_format(worlds, fp8):
    with pytest.raises(UserError, match=r"tensor \S+\.weight_scale_inv holds scales that are not powers of two.*scale_format = .fp32"):
        worlds(1).call(fp8_checkpoints.masters, fp8("plain", "fp32"), unified("pow2"))


def test_scales_in_bfloat16_are_those_in_float32(worlds, fp8, tmp_path):
    folder, expected = make_fp8_checkpoint(tmp_path / "bf16", num_hidden_layers=2), fp8("plain")
    weights = {name: tensor.bfloat16() if name.endswith("_scale_inv") else tensor for name, tensor in read_weights(folder).items()}
    save_file(weights, folder / "model.safetensors")
    worlds(1).call(fp8_checkpoints.import_and_export, folder, unified(), tmp_path / "out")
    assert different(expected, tmp_path / "out") == []


ANY_MODEL = [
    *((name, Layout()) for name in FAMILIES),
    ("qwen3_moe", Layout(dp=2, ep=2)),
    ("qwen3_moe", Layout(pp=2, dp=2, ep=2)),
    ("deepseek_v3", Layout(tp=2, dp=2, ep=4, etp=1)),
    ("glm4", Layout(tp=2)),
]


@pytest.mark.parametrize("architecture, layout", ANY_MODEL)
def test_every_architecture_comes_out_as_it_went_in(worlds, tmp_path, architecture, layout):
    folder = with_random_blocks(make_model(tmp_path / "model", ARCHITECTURES[architecture]), "pow2", seed=3)
    ranks = worlds(layout.world_size).call(fp8_checkpoints.import_and_export, folder, unified(), tmp_path / "out", layout)
    assert all(adopted == layers > 0 for adopted, layers, _ in ranks)
    assert different(folder, tmp_path / "out") == []
