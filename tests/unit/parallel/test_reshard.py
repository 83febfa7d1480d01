"""The reshard plan on random models and layouts: its transfers, executed on real arrays, produce the same shards as a direct cut."""

import re
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import QUANTIZED
from support.geometries import build_checkpoint_shards, plan_case, published_model, small_model, source_shards, target_shards
from support.golden import slow_cut
from support.golden.slow_cut import ROLES, Arrays, Case, as_bf16, as_fp8, as_int8, cases

from megatron_rl.config import PrecisionConfig
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from megatron_rl.sync.plan import SyncPlan
from parallel import model_geometry
from parallel.formats import BLOCK, FP8, INT8, TensorFormat
from parallel.layer_weights import pre_norm_layer
from parallel.layout import Layout
from parallel.megatron_shards import build_megatron_shards, build_trainer_shards, compute_row_order
from parallel.model_geometry import ModelGeometry, MoEGeometry
from parallel.reshard import Transfer, add_scale_transfers, list_stored_tensors, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import GeometryError, HFTensor, Rect, Shard, Weight, stack_regions, take_all, take_rows


def is_padding(shard: Shard) -> np.ndarray:
    """Return bool [rows, cols]: True for elements that belong to no region."""
    return ~slow_cut.lay(shard, {tensor.name: np.ones((tensor.rows, tensor.cols), bool) for tensor, *_ in shard.regions})


def assert_written_once(shards: list[Shard], written: slow_cut.Arrays) -> None:
    by_name = {shard.name: shard for shard in shards}
    for name, times in written.items():
        padding = is_padding(by_name[name]) if name in by_name else np.zeros(times.shape, bool)
        assert (times == ~padding).all(), name
        assert not padding.any() or by_name[name].role in ("embedding", "lm_head")


def carry_out(transfers, sources, targets):
    """Run transfers into fresh arrays shaped like `targets`. Return the arrays, and how often each element was written."""
    filled = {rank: {name: np.zeros_like(array) for name, array in arrays.items()} for rank, arrays in targets.items()}
    written = {rank: {name: np.zeros(array.shape, np.int64) for name, array in arrays.items()} for rank, arrays in targets.items()}
    for transfer in transfers:
        a, b = transfer.source_rect, transfer.target_rect
        values = sources[transfer.source_rank][transfer.source][a.row : a.row + a.rows, a.col : a.col + a.cols]
        window = np.s_[b.row : b.row + b.rows, b.col : b.col + b.cols]
        assert filled[transfer.target_rank][transfer.target][window].shape == values.shape == (b.rows, b.cols), transfer
        filled[transfer.target_rank][transfer.target][window] = values
        written[transfer.target_rank][transfer.target][window] += 1
    return filled, written


def assert_carried(sources: dict[int, list[Shard]], targets: dict[int, list[Shard]], source: Arrays, format: TensorFormat = FP8) -> None:
    """Check that the plan gives every target the arrays of a direct cut, and writes each element once. Padding is never written."""
    format_of = as_fp8 if format is FP8 else as_int8
    expected = slow_cut.cut_all(targets, source, format)
    plan = add_scale_transfers(reshard(sources, targets, format_of))
    filled, written = carry_out(plan, slow_cut.cut_all(sources, source, format), expected)
    slow_cut.assert_same(filled, expected)
    for rank, shards in targets.items():
        assert written[rank].keys() == list_stored_tensors(shards, format_of).keys()
        assert_written_once(shards, written[rank])


@pytest.mark.parametrize("family", QUANTIZED)
@settings(max_examples=8)
@given(data=st.data())
def test_the_engine_gets_every_byte_and_scale_exactly_once(family, data):
    """FP8 moves as whole blocks with one scale each. Without FP8 roles every element moves unchanged."""
    case = data.draw(cases(family))
    plan, targets = plan_case(case), target_shards(case)
    assert_carried(source_shards(case), targets, slow_cut.checkpoint(case.model))
    data, scales = ([transfer for transfer in plan if transfer.format.name == name] for name in ("fp8", "scale"))
    assert len(data) == len(scales) > 0
    for weight, scale in zip(data, scales, strict=True):
        assert (scale.source, scale.target) == (weight.source + "_scale_inv", weight.target + "_scale_inv")
        assert (scale.source_rank, scale.target_rank) == (weight.source_rank, weight.target_rank)
        for small, big in ((scale.source_rect, weight.source_rect), (scale.target_rect, weight.target_rect)):
            assert (small.row * BLOCK, small.col * BLOCK) == (big.row, big.col)
            assert (small.rows, small.cols) == (-(-big.rows // BLOCK), -(-big.cols // BLOCK))  # MLA's kv_a ends inside a block
    unquantized = plan_case(case, as_bf16)
    rects = [region.tensor_rect for shards in targets.values() for shard in shards for region in shard.regions]
    assert {transfer.format.name for transfer in unquantized} <= {"bf16", "fp32"}
    assert sum(move.target_rect.rows * move.target_rect.cols for move in unquantized) == sum(rect.rows * rect.cols for rect in rects)


@pytest.mark.parametrize("family", QUANTIZED)
@settings(max_examples=4)
@given(data=st.data())
def test_an_export_writes_the_checkpoint_and_an_import_the_trainers_shards(family, data):
    case = data.draw(cases(family))
    source, whole = slow_cut.checkpoint(case.model), {0: build_checkpoint_shards(case.model)}
    slow_cut.assert_same(slow_cut.cut_all(whole, source), {0: source})
    assert_carried(source_shards(case), whole, source)
    assert_carried({**target_shards(case), 100: whole[0]}, whole, source)  # kv heads of several ranks; overlapping sources
    assert_carried(whole, source_shards(case), source)


@pytest.mark.parametrize("family", QUANTIZED)
@settings(max_examples=4)
@given(data=st.data())
def test_scales_of_output_channels_go_to_the_engine_and_an_export(family, data):
    case = data.draw(cases(family))
    sources, source = build_trainer_shards(case.model, case.train), slow_cut.checkpoint(case.model, INT8)
    for targets in (target_shards(case), {0: build_checkpoint_shards(case.model)}):
        assert_carried(sources, targets, source, INT8)


def list_stacked_layer(model: ModelGeometry, layer: int) -> list[Weight]:
    """Return the layer of a family whose checkpoint stores q, k and v as one tensor."""
    kind = model.attention[layer]
    q, kv = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
    stacked = HFTensor(f"model.layers.{layer}.self_attn.qkv_proj.weight", q + 2 * kv, model.hidden, "attention_qkv")
    pieces = take_rows(stacked, 0, q), take_rows(stacked, q, kv), take_rows(stacked, q + kv, kv)
    changes = {"pieces": pieces, "stacks": (kind.list_groups(*pieces),)}
    return [weight._replace(**changes) if weight.cut == "qkv" else weight for weight in pre_norm_layer(model, layer)]


def list_rows(ranks: dict[int, list[Shard]], first: dict[str, int]) -> dict[tuple[int, str], list[tuple[str, int]]]:
    """Return (tensor, row) of every row of every shard. Rows of q, k and v start at `first` in a tensor of all three."""
    rows: dict[tuple[int, str], list[tuple[str, int]]] = {}
    for rank, shard in ((rank, shard) for rank, shards in ranks.items() for shard in shards):
        for tensor, rect, *_ in shard.regions:
            name, part = re.sub(r"\b[qkv](?=_proj)", "qkv", tensor.name), tensor.name.split(".")[-2].removesuffix("_proj")
            rows.setdefault((rank, shard.name), []).extend(
                (name, first.get(part, 0) + row) for row in range(rect.row, rect.row + rect.rows)
            )
    return rows


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("widths", [{}, {"head_dim": 64, "heads": 16, "kv_heads": 16}], ids=["heads of 128", "heads of 64"])
def test_the_checkpoint_may_store_qkv_as_one_tensor(tp, widths, monkeypatch):
    """Both sides hold the same rows as with three tensors, and every byte moves."""
    apart, case = small_model(**widths), Case(small_model(**widths, family="stacked"), Layout(tp=tp), tp)
    held = [build_trainer_shards(apart, case.train, format_of=format_of) for format_of in (as_bf16, as_fp8)]
    held.append(build_engine_shards(apart, tp))
    monkeypatch.setattr(model_geometry, "load_family", lambda _: SimpleNamespace(list_layer=list_stacked_layer))
    kind = apart.attention[0]
    q, kv = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
    for shards, three in zip((build_trainer_shards(case.model, case.train), source_shards(case), target_shards(case)), held, strict=True):
        assert list_rows(shards, {}) == list_rows(three, {"q": 0, "k": q, "v": q + kv})
    targets = {**target_shards(case), 100: build_checkpoint_shards(case.model)}
    assert_carried(source_shards(case), targets, slow_cut.checkpoint(case.model))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("widths", [{}, {"head_dim": 64, "heads": 16, "kv_heads": 8}], ids=["heads of 128", "heads of 64"])
def test_quantizing_the_trainers_shards_gives_the_checkpoints_blocks(tp, scale_format, widths):
    """If heads are not whole blocks, rows of linear_qkv are quantized in the order of `compute_row_order`."""
    geometry, layout = small_model(**widths), Layout(tp=tp)
    random = np.random.default_rng(0)
    fp8 = {name: tensor for name, tensor in geometry.tensors().items() if tensor.role in ROLES}
    weights = {name: random.standard_normal((tensor.rows, tensor.cols), np.float32) for name, tensor in fp8.items()}
    grid = {name: quantize_to_arrays(name, weight, scale_format) for name, weight in weights.items()}
    for rank in range(tp):
        quantized = {shard.name: shard for shard in build_megatron_shards(geometry, layout, layout.coordinates(rank), format_of=as_fp8)}
        for shard in build_megatron_shards(geometry, layout, layout.coordinates(rank)):
            if shard.role in ROLES:
                master = slow_cut.lay(shard, weights)
                order = compute_row_order(shard, FP8)
                assert (order is not None) == (bool(widths) and "linear_qkv" in shard.name)
                master = master if order is None else master[order]
                expected = slow_cut.cut([quantized[shard.name]], {key: value for arrays in grid.values() for key, value in arrays.items()})
                slow_cut.assert_same({0: quantize_to_arrays(shard.name, master, scale_format)}, {0: expected})


def quantize_to_arrays(name: str, weight: np.ndarray, scale_format: str) -> slow_cut.Arrays:
    blocks = quantize_weight(torch.from_numpy(weight), scale_format)
    return {name: blocks.data.view(torch.uint8).numpy(), FP8.scale_name(name): blocks.scale.numpy()}


def test_equal_parallelism_moves_nothing_across_ranks_and_overlapping_sources_prefer_the_own_rank():
    """The vocabulary needs no padding here. SGLang shifts the ranks' rows of a padded vocabulary."""
    moe, padded = small_model(family="qwen3_moe", experts=MoEGeometry(count=8, ffn=512), vocab=512), small_model(vocab=300)
    layouts = [Layout(tp=tp, dp=dp) for tp in (1, 2, 4) for dp in (1, 2)]
    plans = [plan_case(Case(small_model(vocab=512), layout, layout.tp)) for layout in layouts]
    for ep in (1, 2, 4):
        plans += [reshard(build_trainer_shards(moe, Layout(tp=4, ep=ep, etp=4 // ep)), build_engine_shards(moe, 4, ep), as_fp8)]
    assert all(plan and all(transfer.source_rank == transfer.target_rank for transfer in plan) for plan in plans)
    crossing = {move.target for move in plan_case(Case(padded, Layout(tp=2), 2)) if move.source_rank != move.target_rank}
    assert crossing == {"model.embed_tokens.weight", "lm_head.weight"}
    tensor = HFTensor("t", 10, 4, "norm")
    sources = {0: [Shard("whole", 10, 4, (take_all(tensor),))], 1: [stack_regions("middle", [take_rows(tensor, 3, 4)])]}
    plan = reshard(sources, {1: [Shard("target", 10, 4, (take_all(tensor),))]}, as_fp8)
    assert [(copy.source_rank, copy.source_rect, copy.target_rect) for copy in plan] == [
        (1, Rect(0, 0, 4, 4), Rect(3, 0, 4, 4)),
        (0, Rect(0, 0, 3, 4), Rect(0, 0, 3, 4)),
        (0, Rect(7, 0, 3, 4), Rect(7, 0, 3, 4)),
    ]


def assert_even(copies: list[Transfer], ranks: int) -> None:
    """Check that every rank sends something, and that loads differ by at most one transfer."""
    sizes = [copy.target_rect.rows * copy.target_rect.cols * copy.format.element_bytes for copy in copies]
    sent: Counter[int] = Counter()
    for copy, size in zip(copies, sizes, strict=True):
        sent[copy.source_rank] += size
    assert set(sent) == set(range(ranks)) and max(sent.values()) - min(sent.values()) <= max(sizes)


def test_replicas_share_the_load_and_replicated_kv_heads_are_sent_to_every_rank_that_needs_them():
    case = Case(small_model(kv_heads=8, vocab=512), Layout(dp=4), 8)
    plan = reshard(source_shards(case), target_shards(case), as_fp8)
    assert all(copy.source_rank == copy.target_rank for copy in plan if copy.target_rank < 4)
    assert_even([copy for copy in plan if copy.target_rank >= 4], 4)
    assert_even(reshard(source_shards(case), target_shards(case), as_fp8, homes={}), 4)
    case = Case(small_model(heads=8, kv_heads=2), Layout(tp=2), 8)
    source = "model.layers.0.self_attn.k_proj.weight"
    copies = [copy for copy in reshard(source_shards(case), target_shards(case), as_fp8) if copy.tensor == source]
    assert [copy.target_rank for copy in copies] == list(range(8))
    assert [copy.source_rank for copy in copies] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_embedding_is_sent_once(pp):
    plan = reshard(*(of(Case(small_model(tied=True), Layout(pp=pp), 1)) for of in (source_shards, target_shards)), as_fp8)
    embedding = [copy for copy in plan if copy.tensor == "model.embed_tokens.weight"]
    assert [(copy.target, copy.target_rect) for copy in embedding] == [("model.embed_tokens.weight", Rect(0, 0, 300, 256))]
    assert not any(copy.target == "lm_head.weight" for copy in plan)


MLP_ROWS = "mlp.gate_proj.weight = rows 0..192, columns 0..256: a shard boundary cuts a 128x128 FP8 block"


@pytest.mark.parametrize("case, start, words", [
    (Case(small_model(ffn=384), Layout(tp=2), 1), MLP_ROWS, "mlp.linear_fc1.weight"),
    (Case(small_model(ffn=384), Layout(), 2), MLP_ROWS, "mlp.gate_up_proj.weight"),
    (Case(small_model(ffn=384), Layout(tp=2), 2), MLP_ROWS, "smaller tensor-parallel size"),
    # heads of 64, which cut blocks in any order
    (Case(small_model(head_dim=64, heads=4, kv_heads=4), Layout(tp=4), 1), "self_attn.q_proj.weight = rows 0..64, ", ""),
    # gate and up are whole on both sides, but up would start inside a block, at row 200 of its shard
    (Case(small_model(ffn=200), Layout(), 1), "mlp.up_proj.weight = rows 0..200, columns 0..256: ", ""),
])  # fmt: skip
def test_a_boundary_that_cuts_blocks_is_refused(case, start, words):
    with pytest.raises(GeometryError) as caught:
        reshard(source_shards(case), target_shards(case), as_fp8)
    assert str(caught.value).startswith(f"model.layers.0.{start}") and words in str(caught.value) and caught.value.fix


def test_heads_of_64_in_their_own_order_are_refused_in_fp8_and_so_is_a_region_without_a_source():
    """The k rows of a group would start inside a block of linear_qkv."""
    geometry = small_model(head_dim=64, heads=4, kv_heads=4)
    sources, targets = build_trainer_shards(geometry, Layout()), build_engine_shards(geometry, 1)
    with pytest.raises(GeometryError, match="model.layers.0.self_attn.q_proj.weight = rows 0..64, .* at its row 0"):
        reshard(sources, targets, as_fp8)
    assert reshard(sources, targets, as_bf16)
    case = Case(small_model(), Layout(pp=2), 1)
    line = "model.embed_tokens.weight = 76800 elements: no source holds what model.embed_tokens.weight of rank 0"
    with pytest.raises(GeometryError, match=line):
        reshard({1: source_shards(case)[1]}, target_shards(case), as_fp8)


def test_a_partial_block_at_the_end_of_a_tensor_is_allowed():
    """With hidden = 200 the last block of every row is partial in trainer, engine and checkpoint."""
    case = Case(small_model(hidden=200), Layout(tp=2), 4)
    assert_carried(source_shards(case), target_shards(case), slow_cut.checkpoint(case.model))


@pytest.mark.long
def test_planning_qwen3_235b_from_128_to_64_ranks_takes_seconds():
    model, train = published_model("Qwen3-235B-A22B"), Layout(tp=4, pp=2, ep=16, etp=1, dp=16)
    assert train.world_size == 128
    start = time.process_time()
    plan = reshard(build_trainer_shards(model, train), build_engine_shards(model, tp=8, ep=8, engines=8), as_fp8, homes={})
    transfers = add_scale_transfers(plan)
    seconds = time.process_time() - start
    assert len(transfers) > len(plan) and seconds < 30  # CPU seconds of one core; 4 on an idle machine
    arrived, sent = Counter(), Counter()
    for copy in plan:
        size = copy.target_rect.rows * copy.target_rect.cols
        arrived[copy.target_rank] += size
        sent[copy.source_rank] += size * copy.format.element_bytes
    wanted = build_engine_shards(model, tp=8, ep=8)
    for rank in range(64):
        assert arrived[rank] == sum(p.tensor_rect.rows * p.tensor_rect.cols for shard in wanted[rank % 8] for p in shard.regions)
    assert len(sent) == 128 and max(sent.values()) < 1.02 * min(sent.values())


@pytest.mark.parametrize(
    "geometry, train, rollout",
    [(small_model(ffn=200), Layout(tp=2), 4), (small_model(head_dim=40, hidden=104), Layout(tp=4), 1), (small_model(ffn=24), Layout(), 8)],
)
def test_any_boundary_is_allowed(geometry, train, rollout):
    """FP8 would refuse these boundaries, which cut 128x128 blocks."""
    case = Case(geometry, train, rollout)
    source = slow_cut.checkpoint(geometry, INT8)
    assert_carried(build_trainer_shards(geometry, train), target_shards(case), source, INT8)


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
