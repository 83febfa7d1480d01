"""A number format end to end. It is unknown to the source; this test adds its row, quantizer and product."""

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from support import toy_format
from support.geometries import PUBLISHED
from support.models import read_weights
from support.receiving_engine import ReceivingEngine
from support.toy_format import MODE, TOY, round_trip
from support.trainer import Trainer

from megatron_rl.config import Config, PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.cost import weights as weight_cost
from megatron_rl.cost.workload import Workload
from megatron_rl.distributed import Rank0
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.kernels.linear.requirements import find_missing
from megatron_rl.mcore.checkpoint.export import convert
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import dequantize, quantize
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.digest import view_rect
from parallel.formats import MODES
from parallel.layout import EngineLayout, Layout
from parallel.layout_hints import find_trainer_problem
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect
from parallel.sglang_shards import build_engine_shards
from parallel.shards import take_all


def sync_and_export(folder, layout, rollout, output):
    """Load a trainer in the format, run one proved sync over shared memory, and export. Return the report, what the engine's ranks hold,
    and the operands and results of a layer's three products."""
    with toy_format.registered():
        trainer = Trainer(folder, {"mode": MODE, "high": "fp32"}, layout=layout)
        plan = SyncPlan.make(ModelGeometry.from_hf_config(trainer.hf_config), layout, rollout, trainer.contract, 1 << 20)
        engine = Rank0(lambda: ReceivingEngine(plan))
        with closing(WeightSync(plan, engine, trainer.collect_named_tensors, SyncConfig(bucket_mb=2))) as sync:
            report = sync.run(1)
        convert(trainer.save(folder.parent / "step_00001"), output, {})
        layer = next(layer for name, layer in find_quantized_layers(trainer.model).items() if name.endswith("fc2"))
        random = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(8, 1, layer.weight.shape[1], generator=random, requires_grad=True)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        y = layer(x)[0]
        dy = torch.randn(y.shape, generator=random)
        y.backward(dy)
        served = []
        engine.run_local(lambda held: served.append(held.tensors))
        operands = {"x": x.detach().flatten(0, 1), "dy": dy.flatten(0, 1), "blocks": layer.blocks}
        products = {"y": y.detach().flatten(0, 1), "dx": x.grad.flatten(0, 1), "dw": layer.weight.main_grad}
        return {"report": report, "served": served, **operands, **products}


@pytest.fixture(autouse=True)
def registered():
    with toy_format.registered():
        yield


@pytest.mark.parametrize("layout, rollout", [(Layout(tp=2), EngineLayout(tp=1)), (Layout(pp=2), EngineLayout(tp=2))], ids=["tp", "pp"])
def test_from_the_trainers_blocks_to_the_engine_and_an_export(worlds, checkpoint, tmp_path, layout, rollout):
    results = worlds(2).call(sync_and_export, checkpoint, layout, rollout, tmp_path / "out")
    model, weights = ModelGeometry.from_hf_config(read_config(checkpoint)), read_weights(checkpoint)
    contract = PrecisionContract.from_config(PrecisionConfig(mode=MODE, high="fp32"))
    assert results[0]["report"].proved == results[0]["report"].tensors > 0

    # the engine holds the blocks of the checkpoint's own grid
    for rank, shards in build_engine_shards(model, *rollout[:3]).items():
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
    assert config["quantization_config"] == contract.engine_format.quantization_config()
    exported = HFCheckpoint(tmp_path / "out", config)
    exported.check(model)
    for name, tensor in model.tensors().items():
        expected = round_trip(weights[name]) if contract.format_of(tensor.role).quantized else weights[name]
        assert torch.equal(exported.read_values(take_all(tensor)), expected), name

    # a layer computed with its own blocks; tensor-parallel ranks hold columns, get their tokens of the sum, and all tokens' gradients
    values = [dequantize(result["blocks"], TOY) for result in results]
    products = [round_trip(result["x"]) @ value.t() for result, value in zip(results, values, strict=True)]
    gradients = [result["dy"] for result in results]
    if layout.tp == 2:
        products, gradients = sum(products).chunk(2), [torch.cat(gradients)] * 2
    for result, value, y, dy in zip(results, values, products, gradients, strict=True):
        torch.testing.assert_close(result["y"], y)
        torch.testing.assert_close(result["dx"], round_trip(dy) @ value)
        torch.testing.assert_close(result["dw"], round_trip(dy.t()) @ round_trip(result["x"].t()).t())


def test_the_planner_counts_its_bytes():
    table = {"model": {"path": "x"}, "precision": {"mode": MODE}}
    job = Workload.from_config(Config.model_validate(table, strict=False), PUBLISHED["Qwen3-8B"] | {"max_position_embeddings": 40960})
    shapes = {(4096, 4096): 2, (1024, 4096): 2, (12288, 4096): 3}  # q and o; k and v; gate, up and down
    held = sum(count * TOY.count_bytes(shape) for shape, count in shapes.items())
    assert weight_cost.count_trainer_memory(job, Layout(), 0).blocks == 36 * held


def test_bytes_of_a_format():
    assert TOY.count_bytes((64, 256)) == 64 * 256 + 64 * 8 and TOY.group_bytes == 1 + 1 / 32


def test_what_fp8_refuses_is_cut_where_its_blocks_allow():
    """192 rows of an MLP on every rank are not whole blocks of 128 rows."""
    model = ModelGeometry.from_hf_config(PUBLISHED["Qwen3-8B"] | {"intermediate_size": 384})
    modes = {mode: PrecisionContract.from_config(PrecisionConfig(mode=mode)) for mode in (MODE, "fp8_unified")}
    problems = {mode: find_trainer_problem(model, Layout(tp=2), contract.format_of) for mode, contract in modes.items()}
    assert problems[MODE] is None and "cuts a 128x128 FP8 block" in str(problems["fp8_unified"])


def test_a_backend_without_its_product_is_refused():
    assert find_missing("emulated", TOY) == [] and find_missing("deep_gemm", TOY) == [("it has no TOY8 products", "name another")]


def test_outside_of_the_table_it_is_no_mode_and_no_checkpoint(monkeypatch):
    monkeypatch.delitem(MODES, MODE)
    with pytest.raises(ValidationError, match=f"should be {', '.join(map(repr, [*MODES][:-1]))} or '[^']*'"):
        PrecisionConfig(mode=MODE)
