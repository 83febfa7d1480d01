"""Plans that leave out rows: the trainer refuses them before anything is sent, and an engine that is sent one does not serve."""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
import torch.distributed as dist
from support.geometries import SMALL_MOE, small_model
from support.receiving_engine import ReceivingEngine

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync import schedule
from megatron_rl.sync.checks import check_coverage, check_pairs
from megatron_rl.sync.plan import SyncPlan, cut_into_chunks
from megatron_rl.sync.weight_sync import WeightSync
from parallel.adapters import AdapterGeometry
from parallel.attention import GatedDeltaNet, LatentAttention, SoftmaxAttention
from parallel.chunking import Chunk
from parallel.digest import make_stored_tensors, view_rect
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer, intersect, subtract
from parallel.shards import Rect

CONTRACT = PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified"))
DENSE = small_model(layers=1, adapters=AdapterGeometry(8, ("linear_qkv", "linear_proj")))
LATENT = replace(
    SMALL_MOE, family="deepseek_v3", experts=replace(SMALL_MOE.experts, count=2),
    attention=(LatentAttention(heads=4, q_rank=128, kv_rank=128, nope_dim=64, rope_dim=64, v_dim=64),),
)  # fmt: skip
HYBRID = replace(
    small_model(), family="qwen3_5_text",
    attention=(
        GatedDeltaNet(k_heads=4, v_heads=8, k_dim=64, v_dim=64, taps=4), SoftmaxAttention(heads=8, kv_heads=4, head_dim=128, gated=True),
    ),
)  # fmt: skip
PLAIN, QKV, NORM = small_model(layers=1), "*.qkv_proj.weight", "model.norm.weight"
LEFT_OUT = [
    (PLAIN, EngineLayout(), "model.embed_tokens.weight", Rect(17, 0, 1, 256)),
    (PLAIN, EngineLayout(tp=2), "model.embed_tokens.weight", Rect(139, 0, 1, 256)),  # the last row before the padding of rank 1
    (PLAIN, EngineLayout(engines=2), "lm_head.weight", Rect(299, 255, 1, 1)),
    (PLAIN, EngineLayout(), QKV, Rect(1536, 0, 512, 256)),  # v
    (PLAIN, EngineLayout(tp=2), QKV, Rect(896, 0, 128, 256)),  # v of a head
    (PLAIN, EngineLayout(tp=2), "*.down_proj.weight_scale_inv", Rect(1, 1, 1, 1)),
    (PLAIN, EngineLayout(), NORM, Rect(0, 0, 256, 1)),
    (DENSE, EngineLayout(), "*.o_proj.lora_A", Rect(0, 0, 8, 1024)),
    (DENSE, EngineLayout(tp=2), "*.qkv_proj.lora_B", Rect(1000, 0, 24, 8)),
    (SMALL_MOE, EngineLayout(), "*.experts.w13_weight", Rect(1024, 0, 512, 256)),  # an expert
    (SMALL_MOE, EngineLayout(tp=2, ep=2), "*.experts.w2_weight", Rect(256, 0, 256, 256)),
    (SMALL_MOE, EngineLayout(tp=2), "*.gate.weight", Rect(3, 0, 1, 256)),
    (LATENT, EngineLayout(), "*.fused_qkv_a_proj_with_mqa.weight", Rect(256, 0, 64, 256)),
    (LATENT, EngineLayout(tp=2), "*.kv_b_proj.weight", Rect(128, 0, 128, 128)),
    (HYBRID, EngineLayout(), "*.in_proj_qkvz.weight", Rect(512, 0, 512, 256)),  # v
    (HYBRID, EngineLayout(tp=2), "*.in_proj_ba.weight", Rect(7, 0, 1, 256)),  # the decay of a head
    (HYBRID, EngineLayout(), "*.conv1d.weight", Rect(0, 0, 1024, 1)),  # a tap
    (HYBRID, EngineLayout(tp=2), "*.A_log", Rect(3, 0, 1, 1)),
    (HYBRID, EngineLayout(tp=2), "*.qkv_proj.weight", Rect(128, 0, 128, 256)),  # the gate of a head
]
CASES = pytest.mark.parametrize(
    "model, engines, name, hole", LEFT_OUT, ids=[f"{model.family} {engines.tp} {name}" for model, engines, name, _ in LEFT_OUT]
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_plans(model: ModelGeometry, engines: EngineLayout, name: str, hole: Rect) -> tuple[SyncPlan, SyncPlan]:
    """Return a plan, and the plan without a part of a tensor of the last rank."""
    plan = SyncPlan.make(model, Layout(), engines, CONTRACT, 100_000)
    transfers = list[Transfer]()
    for each in plan.transfers:
        is_meant = each.target_rank == engines.engines * engines.tp - 1 and fnmatchcase(each.target, name)
        common = intersect(each.target_rect, hole) if is_meant else None
        for rect in [each.target_rect] if common is None else subtract(each.target_rect, common):
            row, col = rect.row - each.target_rect.row, rect.col - each.target_rect.col
            source = Rect(each.source_rect.row + row, each.source_rect.col + col, rect.rows, rect.cols)
            transfers.append(each._replace(source_rect=source, target_rect=rect))
    assert sum(each.nbytes for each in transfers) < sum(each.nbytes for each in plan.transfers), "the hole is in the tensor"
    return plan, replace(plan, transfers=tuple(transfers), chunks=tuple(cut_into_chunks(transfers, 100_000)))


def make_sync(plan: SyncPlan, model: ModelGeometry, **settings) -> tuple[WeightSync, ReceivingEngine]:
    shards = build_trainer_shards(model, Layout(), format_of=CONTRACT.format_of)[0]
    tensors, engine = make_stored_tensors(shards, CONTRACT.format_of), ReceivingEngine(plan)
    return WeightSync(plan, Rank0(lambda: engine), lambda: tensors, SyncConfig(timeout=20.0, **settings)), engine


def list_received(plan: SyncPlan) -> dict[int, list[Chunk]]:
    return {rank: [chunk for chunk in plan.chunks if chunk.target == rank] for rank in plan.targets}


@CASES
def test_the_trainer_refuses_a_plan_that_leaves_out_a_byte(model, engines, name, hole):
    plan, less = make_plans(model, engines, name, hole)
    check_coverage(plan, list_received(plan))
    with pytest.raises(
        RunError, match=rf"^the sync cannot be proved: .*{name.strip('*')} of engine rank \d: no chunk has rows {hole.row}\.\."
    ):
        make_sync(less, model)


@CASES
@pytest.mark.parametrize("delta", ["off", "on"])
def test_an_engine_does_not_serve_if_its_chunks_leave_out_a_byte(monkeypatch, model, engines, name, hole, delta):
    """The trainer believes in the plan, and sends what it says."""
    plan, less = make_plans(model, engines, name, hole)
    monkeypatch.setattr(schedule, "check_coverage", lambda *_: check_coverage(plan, list_received(plan)))
    sync, engine = make_sync(less, model, delta="off" if model is DENSE else delta)
    admitted = []
    engine.resume = lambda: admitted.append(True)
    rank = engines.engines * engines.tp - 1
    line = rf"^the sync is not proved: engine rank {rank}: .*{name.strip('*')}: no chunk of the sync has rows {hole.row}\.\."
    with pytest.raises(RunError, match=line):
        sync.run(1)
    sync.close()
    assert not admitted


def test_padding_is_filled_with_zeros_counted_and_compared_in_every_sync(monkeypatch):
    plan = SyncPlan.make(PLAIN, Layout(), EngineLayout(tp=2), CONTRACT, 100_000)
    sync, engine = make_sync(plan, PLAIN)
    padding = Rect(140, 0, 20, 256)
    for tensors in engine.tensors.values():
        for tensor in tensors.values():
            tensor.view(torch.uint8).fill_(7)
    report = sync.run(1)
    held = sum(tensor.numel() * tensor.element_size() for tensors in engine.tensors.values() for tensor in tensors.values())
    assert report.proved_bytes == report.engine_bytes == held == report.bytes + 2 * 20 * 256 * 2
    assert report.metrics()["sync/proved_bytes"] == held
    name = "model.embed_tokens.weight"
    assert not view_rect(engine.tensors[1][name], padding).any()
    end_sync = engine.end_sync

    def end_and_write(version):
        end_sync(version)
        engine.tensors[1][name][150, 3] = 1  # as a hook of the engine that runs after the sync

    monkeypatch.setattr(engine, "end_sync", end_and_write)
    with pytest.raises(RunError, match=rf"engine rank 1: {name}: the padding in rows 140\.\.159, columns 0\.\.255 is not zero$"):
        sync.run(2)
    sync.close()


def test_a_report_that_differs_from_the_plan_is_refused(monkeypatch):
    """As of an engine that accounts for less than it has, or whose shapes changed after the trainer connected."""
    plan = SyncPlan.make(PLAIN, Layout(), EngineLayout(), CONTRACT, 100_000)
    sync, engine = make_sync(plan, PLAIN)
    sync.run(1)
    account = engine.account_for_tensors
    with monkeypatch.context() as patch:
        patch.setattr(engine, "account_for_tensors", lambda: [replace(report, nbytes=report.nbytes - 2) for report in account()])
        with pytest.raises(RunError, match=r"^the sync is not proved: engine rank 0 accounts for \d+ weights of (\d+) bytes, the plan for"):
            sync.run(2)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "finish_rereading", lambda: {0: [0] * 5})
        with pytest.raises(RunError, match=r"^the sync is not proved: the engine ranks have hashed \{\} chunks, the plan has \{0: \d+\}"):
            sync.run(2)
    engine.tensors[0] = {**engine.tensors[0], "model.extra.weight": torch.zeros(3)}
    with pytest.raises(RunError, match=r"model\.extra\.weight was absent when the trainer connected, and is \(3,\)$"):
        sync.run(2)
    sync.close()


EXCHANGED = [
    (replace(DENSE, adapters=None, attention=(SoftmaxAttention(4, 4, 64),)), "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"),
    (replace(DENSE, adapters=None), "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    (small_model(layers=2), "layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"),
    (small_model(layers=2), "layers.0.input_layernorm", "layers.1.input_layernorm"),
    (SMALL_MOE, "layers.0.mlp.experts.0.up_proj", "layers.0.mlp.experts.1.up_proj"),
    (SMALL_MOE, "layers.0.mlp.experts.0.down_proj", "layers.0.mlp.experts.1.down_proj"),
]


@pytest.mark.parametrize("model, one, other", EXCHANGED, ids=[f"{one} {other}" for _, one, other in EXCHANGED])
def test_two_sources_of_equal_shape_that_are_exchanged_are_named(model, one, other):
    """Both sides would hash the same bytes."""
    plan = SyncPlan.make(model, Layout(), EngineLayout(), CONTRACT, 1 << 20)
    make_sync(plan, model)
    first, second = (
        {(each.of_scales, each.target_rank): each for each in plan.transfers if f"{name}." in each.tensor} for name in (one, other)
    )
    assert first and first.keys() == second.keys()
    source_of = {id(each): second[key] for key, each in first.items()} | {id(each): first[key] for key, each in second.items()}
    transfers = []
    for each in plan.transfers:
        taken = source_of.get(id(each), each)
        transfers.append(each._replace(source=taken.source, source_rect=taken.source_rect))
    wrong = replace(plan, transfers=tuple(transfers), chunks=tuple(cut_into_chunks(transfers, 1 << 20)))
    with pytest.raises(RunError, match=r"^the sync cannot be proved: model.* of engine rank 0 would get model.*, not model.*"):
        make_sync(wrong, model)


def test_an_engine_whose_parameter_stacks_tensors_in_another_order_is_named():
    plan = SyncPlan.make(SMALL_MOE, Layout(), EngineLayout(), CONTRACT, 1 << 20)
    shards = list(plan.targets[0])
    number, stacked = next((number, shard) for number, shard in enumerate(shards) if shard.name.endswith("w13_weight"))
    gate, up, *rest = stacked.regions
    exchanged = gate._replace(tensor=up.tensor), up._replace(tensor=gate.tensor), *rest
    shards[number] = replace(stacked, regions=exchanged)
    with pytest.raises(
        RunError, match=r"^the sync cannot be proved: .*w13_weight of an engine would hold .* in the place of another tensor"
    ):
        check_pairs(replace(plan, targets={0: shards}), plan.chunks)


def test_names_of_two_norms_that_are_exchanged_on_both_sides_are_named():
    plan = SyncPlan.make(PLAIN, Layout(), EngineLayout(), CONTRACT, 1 << 20)
    one, other = (f"model.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))
    targets, sources = list(plan.targets[0]), list(plan.sources[0])
    for shards in (targets, sources):
        places = {shard.regions[0].tensor.name: number for number, shard in enumerate(shards)}
        first, second = places[one], places[other]
        regions = shards[first].regions
        shards[first] = replace(shards[first], regions=shards[second].regions)
        shards[second] = replace(shards[second], regions=regions)
    with pytest.raises(RunError, match=rf"{one} of an engine would hold {other} in the place of another tensor$"):
        check_pairs(replace(plan, targets={0: targets}, sources={0: sources}), plan.chunks)
