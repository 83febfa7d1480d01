"""The masters that a rank draws for its shards equal those of the whole tensor, whatever part it holds."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import PrecisionConfig
from megatron_rl.mcore.weights import master_spread
from megatron_rl.mcore.weights.master_spread import MasterSpread
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.masters import hash_places, spread, spread_blocks, spread_within_blocks
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import quantize
from parallel.digest import view_rect
from parallel.shards import HFTensor, Rect, Region, Shard, stack_regions, take_all, take_rows

ROWS, COLS = 300, 200
TENSOR = HFTensor("model.layers.0.mlp.down_proj.weight", ROWS, COLS, "mlp_out")
WEIGHTS = (torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
PLACES = hash_places(5, TENSOR.name, Rect(0, 0, ROWS, COLS))
CHECKPOINT = SimpleNamespace(read_values=lambda region: view_rect(WEIGHTS, region.tensor_rect))


@pytest.fixture(autouse=True)
def short_strips(monkeypatch):
    monkeypatch.setattr(master_spread, "_STRIP", 128 * COLS)


def make_spread(**precision: str) -> MasterSpread:
    return MasterSpread(5, PrecisionContract.from_config(PrecisionConfig(**precision)))


@pytest.mark.parametrize("precision", [{}, {"scale_format": "fp32"}, {"mode": "int8_rollout", "high": "fp32"}], ids=str)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_region_has_the_masters_of_the_whole_tensor(precision, data):
    drawn, row, col = make_spread(**precision), data.draw(st.integers(0, ROWS - 1)), data.draw(st.integers(0, COLS - 1))
    rect = Rect(row, col, data.draw(st.integers(1, ROWS - row)), data.draw(st.integers(1, COLS - col)))
    whole = spread_within_blocks(WEIGHTS, PLACES, drawn.contract.format_of("mlp_out"))
    into = torch.empty(rect.rows, rect.cols)
    drawn.read(CHECKPOINT, Region(TENSOR, rect), into)
    assert torch.equal(into, view_rect(whole, rect))


def test_masters_of_adopted_blocks_equal_those_of_the_whole_tensor_and_vectors_are_spread_too():
    drawn = make_spread()
    format = drawn.contract.trainer_format
    blocks = quantize(WEIGHTS[:256], format)
    swapped = QuantizedWeight(torch.cat([blocks.data[128:], blocks.data[:128]]), blocks.scale.flip(0))
    shard = stack_regions("w", [take_rows(TENSOR, 128, 128), take_rows(TENSOR, 0, 128)])
    whole = spread_blocks(blocks, PLACES[:256], format)
    assert torch.equal(drawn.draw_for_blocks(shard, swapped, format), torch.cat([whole[128:], whole[:128]]))
    norm = HFTensor("model.norm.weight", 64, 1, "norm", vector=True)
    parameter, master = torch.ones(64).bfloat16(), torch.ones(64)
    make_spread()._spread_slice(stack_regions("norm", [take_all(norm)]), parameter, master, 0)
    assert torch.equal(master.bfloat16(), parameter) and len(master.unique()) > 60


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_slice_of_an_optimizers_master_equals_the_whole_masters(data):
    """The last 10 rows of the parameter are padding."""
    rows, start = 60, data.draw(st.integers(0, 60 * COLS - 1))
    shard = Shard("w", rows, COLS, (Region(TENSOR, Rect(40, 0, 30, COLS)), Region(TENSOR, Rect(0, 0, 20, COLS), 30)))
    parameter, places = torch.zeros(rows, COLS).bfloat16(), torch.zeros(rows, COLS, dtype=torch.int32)
    parameter[:30], parameter[30:50], places[:30], places[30:50] = WEIGHTS[40:70], WEIGHTS[:20], PLACES[40:70], PLACES[:20]
    master = torch.full((data.draw(st.integers(1, rows * COLS - start)),), torch.nan)
    make_spread()._spread_slice(shard, parameter, master, start)
    assert torch.equal(master, spread(parameter, places).view(-1)[start : start + len(master)])


@pytest.mark.parametrize("mode, high, spreads", [
    *(("fp8_unified", "bf16", True), ("fp8_unified", "fp32", True), ("fp8_rollout", "fp32", True), ("int8_rollout", "fp32", True)),
    *(("fp8_rollout", "bf16", False), ("bf16", "fp32", False), ("bf16", "bf16", False)),
])  # fmt: skip
def test_parameters_that_only_the_engine_quantizes_are_spread(mode, high, spreads):
    contract = make_spread(mode=mode, high=high).contract
    assert contract.spreads_parameter("mlp_in") is spreads
    assert not contract.spreads_parameter("norm") and not contract.spreads_parameter("embedding")
