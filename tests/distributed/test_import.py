"""A Hugging Face checkpoint that is imported into a layout and exported again has the same bytes, FP8 blocks and scales included."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.families import ARCHITECTURES, QUANTIZED
from support.fp8_checkpoints import find_changed, make_fp8_checkpoint, split, with_random_blocks
from support.golden import slow_fp8
from support.models import make_bf16_checkpoint, make_model, random_sequences, read_weights
from support.trainer import Trainer, gather_tensors, negative_log_likelihood

from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import describe_weights, write_checkpoint
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers, reorder_rows
from megatron_rl.mcore.optim.quantizing_optimizer import requantize
from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import FP8
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

WIDTHS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "narrow": {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4},  # blocks lie in another order than Megatron's rows
}
LAYERS = ["mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv"]
NAMES = sorted(f"decoder.layers.{layer}.{name}" for layer in range(2) for name in LAYERS)


def save_live(to, trainer):
    """Write what an engine gets from a trainer as a Hugging Face checkpoint. Collective."""
    geometry = ModelGeometry.from_hf_config(trainer.hf_config)
    contract = trainer.contract
    tensors = gather_tensors(trainer.collect_named_tensors(), geometry, trainer.layout, contract.format_of)
    if tensors:
        shaped = {name: tensors[name].view(tensor.shape) for name, tensor in geometry.tensors().items()}
        to.mkdir(parents=True)
        write_checkpoint(to, describe_weights(trainer.hf_config, contract), {**tensors, **shaped}, trainer.folder)
    dist.barrier()


def different(folder, other):
    """Return the names of tensors that differ between two checkpoints in presence, dtype, shape or any byte."""
    tensors, others = read_weights(folder), read_weights(other)
    return sorted({*find_changed(tensors, others), *find_changed(others, tensors)})


def import_checkpoint(folder, precision, layout=None, to=None):
    """Import a checkpoint, and write what an engine gets as a checkpoint `to`. Return which FP8 layers of this rank `adopted` the
    checkpoint's blocks, and on rank 0 by Hugging Face name the parameters (`masters`), what Adam steps (`stepped`), and what an engine gets
    (`served`).
    """
    trainer = Trainer(folder, precision, layout=layout or Layout())
    if to is not None:
        requantize(trainer.actor.optimizer)  # again, though no step was taken
        save_live(to, trainer)
    return {
        "adopted": [layer.adopted for layer in find_quantized_layers(trainer.model).values()],
        "masters": trainer.collect_tensors(fp8=False),
        "stepped": trainer.collect_masters() if "masters" in precision else {},
        "served": trainer.collect_tensors(fp8=True),
    }


def step(folder, precision, batch, learning_rate):
    """Take one optimizer step. Return names of FP8 layers: `all`, those that `kept` the checkpoint's blocks, and those whose blocks are the
    `quantized` master."""

    def same(one, two):
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, two, strict=True))

    trainer = Trainer(folder, precision, {"learning_rate": learning_rate})
    layers = find_quantized_layers(trainer.model)
    first = {name: [part.clone() for part in layer.blocks] for name, layer in layers.items()}
    trainer.actor.update(batch, negative_log_likelihood)
    return {
        "all": list(layers),
        "kept": [name for name, layer in layers.items() if same(layer.blocks, first[name])],
        "quantized": [
            name
            for name, layer in layers.items()
            if same(layer.blocks, quantize_weight(reorder_rows(layer.gather_master(), layer.row_order), layer.format.scale_format))
        ],
    }


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """`fp8(widths, scales)`: the FP8 checkpoint with these widths and scales, made once."""
    made = {}

    def get(widths, scales="pow2"):
        if (widths, scales) not in made:
            made[widths, scales] = make_fp8_checkpoint(tmp_path_factory.mktemp("fp8"), scales, num_hidden_layers=2, **WIDTHS[widths])
        return made[widths, scales]

    return get


def unified(scale_format="pow2"):
    return {"mode": "fp8_unified", "scale_format": scale_format, "high": "bf16"}


def dequantized(folder):
    """Return the float32 values of an FP8 checkpoint, from the definition of the format."""
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


CASES = [
    *(("plain", "pow2", layout) for layout in (Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2))),
    *(("tied", "fp32", layout) for layout in (Layout(), Layout(pp=2))),
    *(("narrow", scales, Layout(tp=2, pp=2)) for scales in ("pow2", "fp32")),
    *((name, "pow2", Layout()) for name in QUANTIZED),
    ("qwen3_moe", "pow2", Layout(dp=2, ep=2)),
    ("qwen3_moe", "pow2", Layout(pp=2, dp=2, ep=2)),
    ("deepseek_v3", "pow2", Layout(tp=2, dp=2, ep=4, etp=1)),
    ("glm4", "pow2", Layout(tp=2)),
]


@pytest.mark.default_cases(10)
@pytest.mark.parametrize("model, scales, layout", CASES, ids=str)
def test_an_fp8_checkpoint_comes_out_as_it_went_in(worlds, fp8, tmp_path, model, scales, layout):
    """Its masters are the dequantized values."""
    of_family = model not in WIDTHS
    folder = with_random_blocks(make_model(tmp_path / "model", ARCHITECTURES[model]), scales, seed=3) if of_family else fp8(model, scales)
    ranks = worlds(layout.world_size).call(import_checkpoint, folder, unified(scales), layout, tmp_path / "out")
    assert all(rank["adopted"] and all(rank["adopted"]) for rank in ranks)
    kept = {tensor for tensor in read_weights(folder) if ".indexer." in tensor}  # engines get none
    assert set(different(folder, tmp_path / "out")) == kept and (kept != set()) == ("index_topk" in read_config(folder))
    if not of_family:
        assert len(read_weights(folder)) == 3 + 2 * (4 + 2 * 7) - (model == "tied")
        assert_dequantized(folder, ranks[0]["masters"])


def assert_dequantized(folder, masters):
    expected = dequantized(folder)
    assert masters.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(masters[name], expected[name])] == []


def test_these_checkpoints_are_not_what_our_quantizer_would_make(worlds, fp8, tmp_path):
    """The test above can fail: quantizing the dequantized values again changes bytes and scales of every weight."""
    folder, again = fp8("plain"), tmp_path / "again"
    write_checkpoint(tmp_path, {**read_config(folder), "quantization_config": None}, dequantized(folder), folder)
    worlds(1).call(import_checkpoint, tmp_path, unified(), None, again)
    wrong = different(folder, again)
    assert {f"model.layers.0.{name}" for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight_scale_inv")} <= set(wrong)
    assert len(wrong) == 2 * 2 * 7


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=str)
def test_a_bf16_checkpoint_comes_out_as_it_went_in(worlds, tmp_path, layout):
    folder = make_bf16_checkpoint(tmp_path / "bf16", num_hidden_layers=2)
    worlds(layout.world_size).call(import_checkpoint, folder, {"mode": "bf16", "high": "bf16"}, layout, tmp_path / "out")
    assert different(folder, tmp_path / "out") == []


def test_several_files_and_scales_in_bfloat16_are_the_same_checkpoint(worlds, fp8, tmp_path):
    parts = make_fp8_checkpoint(tmp_path / "parts", num_hidden_layers=2)
    weights = {name: tensor.bfloat16() if name.endswith("_scale_inv") else tensor for name, tensor in read_weights(parts).items()}
    save_file(weights, parts / "model.safetensors")
    worlds(2).call(import_checkpoint, split(parts, 3), unified(), Layout(tp=2), tmp_path / "out")
    assert different(fp8("plain"), tmp_path / "out") == []


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
@pytest.mark.parametrize("precision", [{"mode": "bf16", "high": "fp32"}, {"mode": "fp8_rollout", "high": "fp32"}])
def test_a_trainer_without_fp8_starts_from_the_dequantized_values(worlds, fp8, layout, precision):
    folder = fp8("narrow")
    assert_dequantized(folder, worlds(layout.world_size).call(import_checkpoint, folder, precision, layout)[0]["masters"])


def test_an_engine_beside_a_high_precision_trainer_gets_the_same_values(worlds, fp8, tmp_path):
    """`fp8_rollout` quantizes what the trainer holds. With pow2 scales some blocks get other bytes, but the same values."""
    folder = fp8("plain")
    worlds(1).call(import_checkpoint, folder, {"mode": "fp8_rollout", "high": "bf16"}, None, tmp_path / "out")
    served, expected = read_weights(tmp_path / "out"), dequantized(folder)
    assert different(folder, tmp_path / "out") != []
    for name, values in expected.items():
        if FP8.scale_name(name) in served:
            assert torch.equal(dequantize_weight(QuantizedWeight(served[name], served[FP8.scale_name(name)])), values), name


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    return make_bf16_checkpoint(tmp_path_factory.mktemp("bf16"), num_hidden_layers=2, tie_word_embeddings=True, **WIDTHS["narrow"])


SPREAD = [
    (unified(), Layout(tp=2, dp=2)),
    ({"mode": "fp8_rollout", "high": "fp32"}, Layout(tp=2)),
    ({"mode": "bf16", "high": "bf16"}, Layout(tp=2, dp=2)),
]


@pytest.mark.parametrize("precision, layout", SPREAD, ids=str)
def test_masters_are_the_same_in_any_layout_and_round_to_the_checkpoint(worlds, bf16, precision, layout):
    stored, spread = read_weights(bf16), precision | {"masters": "spread"}
    result = worlds(layout.world_size).call(import_checkpoint, bf16, spread, layout)[0]
    alone = worlds(1).call(import_checkpoint, bf16, spread)[0]
    plain = worlds(1).call(import_checkpoint, bf16, precision | {"masters": "stored"})[0]
    masters = result["stepped"]
    assert masters.keys() == alone["stepped"].keys() == stored.keys() == result["masters"].keys()
    for name, values in stored.items():
        assert torch.equal(masters[name], alone["stepped"][name]), name
        assert torch.equal(masters[name].bfloat16(), values) and torch.equal(result["masters"][name].bfloat16(), values), name
        coarser = precision["high"] == "bf16" or name.endswith("_proj.weight")
        assert (float((masters[name] == values.float()).float().mean()) < 0.02) is coarser, name
    assert [name for name, tensor in plain["served"].items() if not torch.equal(result["served"][name], tensor)] == []


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_masters_of_an_fp8_checkpoint_are_the_same_in_any_layout_and_leave_its_blocks(worlds, fp8, layout):
    precision, folder = unified() | {"masters": "spread"}, fp8("narrow")
    result = worlds(layout.world_size).call(import_checkpoint, folder, precision, layout)[0]
    alone = worlds(1).call(import_checkpoint, folder, precision)[0]["stepped"]
    assert [name for name in alone if not torch.equal(result["stepped"][name], alone[name])] == []
    for name, tensor in read_weights(folder).items():
        expected = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor.float()
        assert torch.equal(result["served"][name], expected), name


@pytest.mark.parametrize("size, widths", [(1, "plain"), (2, "narrow")])
def test_the_first_optimizer_step_quantizes_again(worlds, fp8, size, widths):
    for layers in worlds(size).call(step, fp8(widths), unified(), random_sequences(4, seed=2), 1e-3):
        assert sorted(layers["all"]) == NAMES == sorted(layers["quantized"])
        assert layers["kept"] == []


def test_a_broken_value_on_one_rank_stops_every_rank(worlds, tmp_path):
    folder = make_fp8_checkpoint(tmp_path)
    weights = read_weights(folder)
    weights["model.layers.0.mlp.gate_proj.weight"].view(torch.uint8)[300, 3] = 0xFF  # rank 1 holds rows 256 to 511
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor model\.layers\.0\.mlp\.gate_proj\.weight holds inf or NaN"):
        worlds(2).call(import_checkpoint, folder, unified(), Layout(tp=2))
