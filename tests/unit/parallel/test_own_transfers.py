"""What each trainer rank plans alone is its share of the plan for all ranks, in any layout, and its cost does not grow with the ranks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.geometries import published_model, small_model
from support.golden import slow_cut

from megatron_rl.config import PrecisionConfig
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from parallel import model_geometry, own_transfers
from parallel.adapters import AdapterGeometry
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError

MODES = ("fp8_unified", "int8_rollout", "bf16")


def make_contract(mode: str, **fields: str) -> PrecisionContract:
    return replace(PrecisionContract.from_config(PrecisionConfig(mode=mode)), **fields)


def assert_own_plans_are_the_plan(
    model: ModelGeometry, train: Layout, engines: EngineLayout, contract: PrecisionContract, limit: int
) -> None:
    whole = SyncPlan.make(model, train, engines, contract, limit)
    owns = [SyncPlan.make(model, train, engines, contract, limit, rank) for rank in range(train.world_size)]
    for rank, own in enumerate(owns):
        assert own.transfers == tuple(each for each in whole.transfers if each.source_rank == rank)
        chunks = tuple(chunk for chunk in whole.chunks if chunk.source == rank)
        assert own.chunks == chunks and [chunk.buffer for chunk in own.chunks] == [chunk.buffer for chunk in chunks]
        assert list(map(own.freezes, own.chunks)) == list(map(whole.freezes, chunks))
        assert dict(own.targets) == whole.targets and own.has_adapters == whole.has_adapters
    assert sum(len(own.transfers) for own in owns) == len(whole.transfers) > 0
    for target in whole.targets:  # an engine rank can put its chunks in order without the plan
        received = [chunk for own in owns for chunk in own.chunks if chunk.target == target]
        expected = tuple(chunk for chunk in whole.chunks if chunk.target == target)
        assert tuple(sorted(received, key=lambda chunk: (chunk.buffer, chunk.source))) == expected


@given(slow_cut.cases(), st.sampled_from([60_000, 300_000, 1 << 24]), st.integers(1, 3), st.sampled_from(MODES), st.booleans())
def test_the_plans_of_all_ranks_together_are_the_whole_plan(case, limit, engines, mode, adapted):
    model = case.model
    if adapted:
        model = replace(model, adapters=AdapterGeometry(8, ("linear_qkv", "linear_proj", "linear_fc2")))
    try:
        SyncPlan.make(model, case.train, EngineLayout(case.rollout_tp, case.rollout_ep, engines), make_contract(mode), limit)
    except GeometryError:
        return  # a mode whose blocks these widths do not fit
    assert_own_plans_are_the_plan(model, case.train, EngineLayout(case.rollout_tp, case.rollout_ep, engines), make_contract(mode), limit)


@pytest.mark.parametrize("model, train, engines", [
    (small_model(tied=True), Layout(tp=2, pp=2, dp=2), EngineLayout(2, 1, 3)),
    (small_model(tied=True, tied_in_engine=False), Layout(pp=2, dp=2), EngineLayout(1, 1, 5)),
    (small_model(vocab=130), Layout(tp=4), EngineLayout(4, 1, 2)),  # the last ranks hold only padding
    (small_model(kv_heads=2), Layout(tp=2, dp=3), EngineLayout(8, 1, 2)),  # engine ranks share key-value heads
    (small_model(layers=6), Layout(pp=2, vpp=2, last_stage_layers=2, dp=2), EngineLayout(1, 1, 7)),
])  # fmt: skip
@pytest.mark.parametrize("kv", ["high", "e4m3_per_layer"])
def test_the_same_of_ties_padding_shared_heads_and_scales_of_the_cache(model, train, engines, kv):
    assert_own_plans_are_the_plan(model, train, engines, make_contract("fp8_unified", kv=kv), 200_000)


def test_a_rank_looks_up_only_what_it_sends(monkeypatch):
    """The 235B on 128 and on 256 GPUs: a rank plans as many transfers, and builds as few parts of engine ranks."""
    built = []
    build = own_transfers.build_part
    monkeypatch.setattr(own_transfers, "build_part", lambda *args: built.append(args) or build(*args))
    model, sizes = published_model("Qwen3-235B-A22B"), []
    for dp in (1, 2):
        built.clear()
        train, engines = Layout(tp=8, pp=16, last_stage_layers=4, ep=8, etp=1, dp=dp), EngineLayout(8, 8, 16 * dp)
        plan = SyncPlan.make(model, train, engines, make_contract("fp8_unified"), 1 << 24, rank=3 * 8 * dp)
        sizes.append((len(plan.transfers), sum(chunk.nbytes for chunk in plan.chunks), len({args[3:] + args[2:3] for args in built})))
    assert sizes[0] == sizes[1]
    assert sizes[0][2] <= 8 * (6 + 3)  # 8 engine ranks; the 6 layers of its stage, and what precedes and follows a kind of layer


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B", "Qwen3.5-122B-A10B"])
@pytest.mark.parametrize("adapters", [None, AdapterGeometry(3, ("linear_qkv", "linear_fc1"))])
def test_a_rank_lists_only_weights_of_its_layers(monkeypatch, name, adapters):
    """Besides, one layer of each kind says how large the other layers of an engine rank are."""
    listed = []
    build = model_geometry._list_decoder_part
    monkeypatch.setattr(model_geometry, "_list_decoder_part", lambda model, part: listed.append(part) or build(model, part))
    model_geometry._list_part.cache_clear()
    model, train = replace(published_model(name), adapters=adapters), Layout(tp=4, pp=2, ep=4, etp=1)
    SyncPlan.make(model, train, EngineLayout(4, 4, 2), make_contract("fp8_unified"), 1 << 24, rank=train.world_size - 1)
    own = {0, model.layers + 1, *(1 + layer for layer in range(model.layers // 2, model.layers))}
    assert own <= set(listed) and len(set(listed) - own) <= len(model.layer_kinds) and len(listed) == len(set(listed))
