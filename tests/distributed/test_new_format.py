"""A number format unknown to the source goes end to end: one row, one quantizer and one product, added by the test alone."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from support import toy_format
from support.geometries import PUBLISHED
from support.models import read_weights
from support.toy_format import MODE, TOY, round_trip

from megatron_rl.config import Config, PrecisionConfig
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.planner import memory
from megatron_rl.planner.candidate import Workload
from megatron_rl.precision.backends.requirements import find_missing
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import dequantize, quantize
from parallel.digest import view_rect
from parallel.formats import MODES
from parallel.layout import EngineLayout, Layout
from parallel.layout_hints import find_trainer_problem
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect
from parallel.sglang_shards import build_engine_shards
from parallel.shards import take_all

QWEN3_8B = {"rope_theta": 1e6, "max_position_embeddings": 40960, **PUBLISHED["Qwen3-8B"]}


@pytest.fixture(autouse=True)
def registered():
    with toy_format.registered():
        yield


@pytest.mark.parametrize("layout, rollout", [(Layout(tp=2), EngineLayout(tp=1)), (Layout(pp=2), EngineLayout(tp=2))], ids=["tp", "pp"])
def test_from_the_trainers_blocks_to_the_engine_and_an_export(worlds, checkpoint, tmp_path, layout, rollout):
    results = worlds(2).call(toy_format.sync_and_export, checkpoint, layout, rollout, tmp_path / "out")
    model, weights = ModelGeometry.from_hf_config(read_config(checkpoint)), read_weights(checkpoint)
    contract = PrecisionContract.from_config(PrecisionConfig(mode=MODE, high="fp32"))
    assert results[0]["report"].proved == results[0]["report"].tensors > 0

    # the engine holds the blocks of the checkpoint's own grid
    for rank, shards in build_engine_shards(model, *rollout).items():
        for shard, region in ((each, region) for each in shards for region in each.regions):
            tensors, whole = results[0]["served"][0][rank], weights[region.tensor.name]
            if contract.format_of(shard.role).quantized:
                blocks, scales = quantize(whole, TOY), tensors[TOY.scale_name(shard.name)]
                held, expected = (get_scale_rect(rect, TOY) for rect in (region.shard_rect, region.tensor_rect))
                assert torch.equal(view_rect(scales, held), view_rect(blocks.scale, expected)), shard.name
                whole = blocks.data
            values = view_rect(tensors[shard.name], region.shard_rect), view_rect(whole, region.tensor_rect)
            assert torch.equal(*(value.contiguous().view(torch.uint8) for value in values)), shard.name

    # the export says so in its config.json and is read back
    config = read_config(tmp_path / "out")
    assert config["quantization_config"] == {"quant_method": "toy8", "weight_block_size": [1, 32]}
    exported = HFCheckpoint(tmp_path / "out", config)
    exported.check(model)
    for name, tensor in model.tensors().items():
        expected = round_trip(weights[name]) if contract.format_of(tensor.role).quantized else weights[name]
        assert torch.equal(exported.read_values(take_all(tensor)), expected), name

    # the layers computed with their own blocks; tensor-parallel ranks hold columns, and get their tokens of the sum
    values = [dequantize(result["blocks"], TOY) for result in results]
    products = [round_trip(result["x"].flatten(0, 1)) @ value.t() for result, value in zip(results, values, strict=True)]
    expected = sum(products).chunk(2) if layout.tp == 2 else products
    for result, value, y in zip(results, values, expected, strict=True):
        torch.testing.assert_close(result["y"].flatten(0, 1), y)
        torch.testing.assert_close(result["dx"].flatten(0, 1), torch.ones(8, len(value)) @ value)


def test_the_planner_counts_its_bytes():
    assert TOY.count_bytes((64, 256)) == 64 * 256 + 64 * 8 and TOY.group_bytes == 1 + 1 / 32
    table = {"model": {"path": "x"}, "precision": {"mode": MODE}}
    job = Workload.from_config(Config.model_validate(table, strict=False), QWEN3_8B)
    weights = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    assert memory.count_trainer_memory(job, Layout(), 0).blocks == weights * 33 // 32


def test_what_fp8_refuses_is_cut_where_its_blocks_allow():
    """192 rows of an MLP on every rank are no whole blocks of 128 rows."""
    model = ModelGeometry.from_hf_config(QWEN3_8B | {"intermediate_size": 384})
    modes = {mode: PrecisionContract.from_config(PrecisionConfig(mode=mode)) for mode in (MODE, "fp8_unified")}
    problems = {mode: find_trainer_problem(model, Layout(tp=2), contract.format_of) for mode, contract in modes.items()}
    assert problems[MODE] is None and "cuts a 128x128 FP8 block" in str(problems["fp8_unified"])


def test_a_backend_without_its_product_is_refused():
    assert find_missing("emulated", TOY) == [] and find_missing("deep_gemm", TOY) == [("it has no TOY8 products", "name another")]


def test_outside_of_the_table_it_is_no_mode_and_no_checkpoint(monkeypatch):
    monkeypatch.delitem(MODES, MODE)
    with pytest.raises(ValidationError, match="should be 'bf16', 'fp8_rollout', 'int8_rollout' or 'fp8_unified'"):
        PrecisionConfig(mode=MODE)
