"""The reshard plan of INT8 weights: every byte and every row's scale moves exactly once, wherever rows and columns are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.geometries import filled_rows, small_model
from support.golden import slow_cut
from support.golden.slow_cut import ROLES, Arrays, Case, as_int8, cases

from megatron_rl.config import PrecisionConfig
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from parallel.families import FAMILIES
from parallel.formats import FP8, INT8
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry, MoEGeometry
from parallel.reshard import Transfer, add_scale_transfers, list_stored_tensors, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Rect, Shard


def checkpoint(geometry: ModelGeometry) -> Arrays:
    """Return random bytes of every tensor. Every row of a quantized tensor has a different scale."""
    arrays = slow_cut.checkpoint(geometry)
    for tensor in geometry.tensors().values():
        if tensor.role in ROLES:
            del arrays[FP8.scale_name(tensor.name)]
            arrays[INT8.scale_name(tensor.name)] = 1 + np.arange(tensor.rows, dtype=np.float32)[:, None]
    return arrays


def cut(shards: list[Shard], source: Arrays) -> Arrays:
    """Return a rank's tensors, cut directly: data by rectangles, scales by rows."""
    arrays: Arrays = {}
    for shard in shards:
        arrays[shard.name] = np.zeros((shard.rows, shard.cols), source[shard.regions[0].tensor.name].dtype)
        scales = np.zeros((shard.rows, 1), np.float32)
        for region in shard.regions:
            row, col, rows, cols = region.tensor_rect
            shard_rows = slice(region.shard_row, region.shard_row + rows)
            values = source[region.tensor.name][row : row + rows, col : col + cols]
            arrays[shard.name][shard_rows, region.shard_col : region.shard_col + cols] = values
            if shard.role in ROLES:
                scales[shard_rows] = source[INT8.scale_name(region.tensor.name)][row : row + rows]
        if shard.role in ROLES:
            arrays[INT8.scale_name(shard.name)] = scales
    return arrays


def planned(sources: dict[int, list[Shard]], targets: dict[int, list[Shard]]) -> list[Transfer]:
    return add_scale_transfers(reshard(sources, targets, as_int8))


def assert_carried(sources: dict[int, list[Shard]], targets: dict[int, list[Shard]], source: Arrays) -> None:
    expected = {rank: cut(shards, source) for rank, shards in targets.items()}
    given = {rank: cut(shards, source) for rank, shards in sources.items()}
    filled, written = slow_cut.carry_out(planned(sources, targets), given, expected)
    slow_cut.assert_same(filled, expected)
    for rank, arrays in written.items():
        assert all((times <= 1).all() for times in arrays.values())  # padding is never written
        assert arrays.keys() == list_stored_tensors(targets[rank], as_int8).keys()
        for shard in targets[rank]:
            assert (arrays[shard.name][: filled_rows(shard)] == 1).all(), shard.name
            assert shard.role not in ROLES or (arrays[INT8.scale_name(shard.name)] == 1).all(), shard.name


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4)
@given(data=st.data())
def test_the_engine_and_an_export_get_every_byte_and_scale_exactly_once(family, data):
    case = data.draw(cases(family))
    sources = build_trainer_shards(case.model, case.train)
    targets = build_engine_shards(case.model, case.rollout_tp, case.rollout_ep, case.engines)
    assert_carried(sources, targets, checkpoint(case.model))
    assert_carried(sources, {0: case.model.build_checkpoint_shards()}, checkpoint(case.model))


@pytest.mark.parametrize(
    "geometry, train, rollout",
    [(small_model(ffn=200), Layout(tp=2), 4), (small_model(head_dim=40, hidden=104), Layout(tp=4), 1), (small_model(ffn=24), Layout(), 8)],
)
def test_any_boundary_is_allowed(geometry, train, rollout):
    """FP8 would refuse these boundaries, which cut 128x128 blocks."""
    case = Case(geometry, train, rollout)
    assert_carried(build_trainer_shards(case.model, case.train), build_engine_shards(case.model, case.rollout_tp), checkpoint(case.model))


def test_a_sync_plan_counts_a_byte_per_weight_and_four_per_row():
    contract = PrecisionContract.from_config(PrecisionConfig(mode="int8_rollout"))
    plan = SyncPlan.make(small_model(), Layout(tp=2), (2, 1), contract, 1 << 20)
    rows, fp8 = 1024 + 256 + 1024 + 256, 2 * 1024 * 256 + 2 * 256 * 512  # of a layer on an engine rank
    high = 2 * (256 * 5 + 128 * 4) + 2 * 300 * 256  # norms, vocabulary
    assert sum(transfer.nbytes for transfer in plan.transfers) == 2 * 2 * (fp8 + 4 * rows) + 2 * high
    assert sum(chunk.nbytes for chunk in plan.chunks) == 2 * 2 * (fp8 + 4 * rows) + 2 * high


def test_experts_fill_sglangs_stacked_tensors_with_scales_per_output_channel():
    """Each engine rank holds two of four experts, each trainer rank half of every expert (etp = 2). w13 [2, 256, 256] stacks gate and up;
    the columns of w2 [2, 256, 128] come from two sources, its scales from one."""
    geometry = small_model(family="qwen3_moe", experts=MoEGeometry(count=4, ffn=128))
    contract = PrecisionContract.from_config(PrecisionConfig(mode="int8_rollout"))
    plan = SyncPlan.make(geometry, Layout(tp=2, ep=1, etp=2), (2, 2), contract, 1 << 20)
    prefix = "model.layers.0.mlp.experts."
    shapes = {shard.name: (shard.shape, shard.scale_shape(INT8)) for shard in plan.targets[1] if shard.name.startswith(prefix)}
    assert shapes == {prefix + "w13_weight": ((2, 256, 256), (2, 256, 1)), prefix + "w2_weight": ((2, 256, 128), (2, 256, 1))}
    moves = [transfer for transfer in plan.transfers if transfer.target_rank == 1 and prefix in transfer.target]
    fc1, fc2 = (
        f"decoder.layers.0.mlp.experts.local_experts.3.linear_fc{n}.weight" for n in (1, 2)
    )  # the second expert of this engine rank

    def rects(source: str, target: str) -> set[Rect]:
        return {move.target_rect for move in moves if (move.source, move.target) == (source, prefix + target)}

    assert rects(fc1 + "_scale", "w13_weight_scale") == {Rect(first, 0, 64, 1) for first in (256, 320, 384, 448)}
    assert rects(fc2, "w2_weight") == {Rect(256, 0, 256, 64), Rect(256, 64, 256, 64)}
    assert rects(fc2 + "_scale", "w2_weight_scale") == {Rect(256, 0, 256, 1)}
