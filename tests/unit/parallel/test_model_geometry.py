"""How trainer and engine shard a model, compared with numpy and Megatron-Core; and which layouts are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.geometries import HIDDEN, KV_HEADS, SMALL_MOE, VOCAB, small_model
from support.golden import slow_cut

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config
from megatron_rl.config import TrainConfig
from megatron_rl.mcore.transformer_config import layout_options
from parallel.families import FAMILIES
from parallel.formats import FP8
from parallel.layout import Layout, balance_stages, check_stages, count_stage_layers, list_stage_layers
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_sglang_shards
from parallel.shards import GeometryError, Shard

QKV = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]


def trainer(geometry: ModelGeometry, layout: Layout) -> list[list[Shard]]:
    return [build_megatron_shards(geometry, layout, layout.coordinates(rank)) for rank in range(layout.world_size)]


def names(shards: list[Shard]) -> set[str]:
    return {shard.name for shard in shards}


NARROW = {"heads": 16, "head_dim": 64, "vocab": 320}


@pytest.mark.parametrize("widths, tp", [({}, 1), ({}, 2), ({}, 4), (NARROW, 8), (NARROW, 16)])
def test_megatron_interleaves_q_k_v_by_group_and_splits_gate_up_per_rank(widths, tp):
    """More ranks than key-value heads cut through the groups."""
    model, layer = small_model(**widths), "decoder.layers.1."
    source = slow_cut.checkpoint(model)
    q, k, v = (source[name].reshape(KV_HEADS, -1, HIDDEN) for name in QKV)
    qkv = np.concatenate([q, k, v], axis=1).reshape(tp, -1, HIDDEN)
    gate, up = (source[f"model.layers.1.mlp.{part}_proj.weight"].reshape(tp, -1, HIDDEN) for part in ("gate", "up"))
    proj = np.split(source["model.layers.1.self_attn.o_proj.weight"], tp, axis=1)
    down = np.split(source["model.layers.1.mlp.down_proj.weight"], tp, axis=1)
    embedding = np.split(source["model.embed_tokens.weight"], tp)
    for rank, shards in enumerate(trainer(model, Layout(tp=tp))):
        shard = next(shard for shard in shards if shard.name == layer + "self_attention.linear_qkv.weight")
        rows = np.concatenate([source[p.tensor.name][p.tensor_rect.row : p.tensor_rect.row + p.tensor_rect.rows] for p in shard.regions])
        assert np.array_equal(rows, qkv[rank])
        if widths:  # these ranks cut FP8 blocks
            continue
        tensors = slow_cut.cut(shards, source)
        assert np.array_equal(tensors[layer + "mlp.linear_fc1.weight"], np.concatenate([gate[rank], up[rank]]))
        assert np.array_equal(tensors[layer + "self_attention.linear_proj.weight"], proj[rank])
        assert np.array_equal(tensors[layer + "mlp.linear_fc2.weight"], down[rank])
        assert np.array_equal(tensors["embedding.word_embeddings.weight"], embedding[rank])
        assert np.array_equal(tensors["decoder.final_layernorm.weight"], source["model.norm.weight"])


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sglang_stacks_q_k_v_per_rank_and_replicates_kv_heads(tp):
    source = slow_cut.checkpoint(small_model())
    q, k, v = (np.split(source[QKV[0]], tp), *(np.split(source[name], KV_HEADS) for name in QKV[1:]))
    gate, up = (np.split(source[f"model.layers.1.mlp.{part}_proj.weight"], tp) for part in ("gate", "up"))
    for rank in range(tp):
        tensors = slow_cut.cut(build_sglang_shards(small_model(), tp, rank), source)
        heads = range(KV_HEADS)[rank * KV_HEADS // tp :][: max(KV_HEADS // tp, 1)]
        expected = np.concatenate([q[rank], *(k[head] for head in heads), *(v[head] for head in heads)])
        assert np.array_equal(tensors["model.layers.1.self_attn.qkv_proj.weight"], expected)
        assert np.array_equal(tensors["model.layers.1.mlp.gate_up_proj.weight"], np.concatenate([gate[rank], up[rank]]))


@pytest.mark.parametrize("tp, per_rank", [(1, 320), (2, 160), (4, 80), (8, 40)])
def test_sglang_pads_the_vocabulary_to_64_and_the_last_rank_holds_the_padding(tp, per_rank):
    wide = small_model(kv_heads=8)
    shards = [next(shard for shard in build_sglang_shards(wide, tp, rank) if shard.role == "embedding") for rank in range(tp)]
    assert [shard.rows for shard in shards] == [per_rank] * tp
    rects = [shard.regions[0].tensor_rect for shard in shards]
    assert [row for rect in rects for row in range(rect.row, rect.row + rect.rows)] == list(range(VOCAB))
    only_padding = build_sglang_shards(small_model(vocab=5, kv_heads=8), 8, 7)[0]
    assert (only_padding.rows, only_padding.regions[0].tensor_rect.rows) == (8, 0)


@pytest.mark.parametrize("layers, layout, numbers", [
    (2, Layout(pp=2), [[0], [1]]),
    (8, Layout(pp=2, vpp=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (4, Layout(pp=2, first_stage_layers=3), [[0, 1, 2], [3]]),
    (6, Layout(pp=2, vpp=2, last_stage_layers=4), [[0, 3], [1, 2, 4, 5]]),
])  # fmt: skip
def test_pipeline_stages_hold_their_layers_with_global_numbers(layers, layout, numbers):
    first, second = trainer(small_model(layers=layers), layout)
    assert [sorted({int(name.split(".")[2]) for name in names(stage) if "layers" in name}) for stage in (first, second)] == numbers
    assert "embedding.word_embeddings.weight" in names(first) - names(second)
    assert {"decoder.final_layernorm.weight", "output_layer.weight"} <= names(second) - names(first)


@pytest.mark.parametrize("pp, holds", [(1, set()), (2, {"output_layer.weight"})])
def test_the_last_of_several_stages_keeps_a_copy_of_a_tied_embedding(pp, holds):
    last = trainer(small_model(tied=True), Layout(pp=pp))[-1]
    assert names(last) & {"output_layer.weight"} == holds
    assert {shard.regions[0].tensor.name for shard in last if shard.name in holds} == ({"model.embed_tokens.weight"} if holds else set())
    assert "lm_head.weight" not in names(build_sglang_shards(small_model(tied=True), 1, 0))


def test_coordinates_are_unique_and_data_parallel_ranks_hold_equal_shards():
    layout = Layout(tp=2, pp=2, dp=2)
    shards = trainer(small_model(), layout)
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert shards[rank] == shards[place.tp + layout.tp * layout.dp * place.pp]
    for rank in (-1, 8):
        with pytest.raises(ValueError, match=r"rank -?\d is outside tp\(2\) \* cp\(1\) \* dp\(2\) \* pp\(2\) = 8"):
            layout.coordinates(rank)
    layout = Layout(tp=2, cp=3, dp=4, pp=2, ep=4, etp=3)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert (layout.world_size, layout.edp) == (48, 2)
    for rank, place in enumerate(places):
        assert rank == place.tp + 2 * (place.cp + 3 * (place.dp + 4 * place.pp))
        assert rank == place.etp + 3 * (place.ep + 4 * (place.edp + 2 * place.pp))


FIELDS = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"]


def read(**changes: object) -> ModelGeometry:
    """Read a config.json with `changes`, without those that are None."""
    config = make_hf_config(ArchitectureConfig(), 0, "fp32") | {"num_key_value_heads": 2, **changes}
    return ModelGeometry.from_hf_config({name: value for name, value in config.items() if value is not None})


PARTLY_DENSE = replace(
    SMALL_MOE, attention=SMALL_MOE.attention * 2, experts=replace(SMALL_MOE.experts, dense_layers=frozenset({1}), dense_in_engine=False)
)


@pytest.mark.parametrize("refused, words", [
    (lambda: ModelGeometry.from_hf_config({"model_type": "gpt2"}), ["gpt2", ", ".join(FAMILIES)]),
    (lambda: ModelGeometry.from_hf_config({}), ["model_type = None", "qwen3"]),
    (lambda: read(num_attention_heads=3), ["num_attention_heads = 3: must be a multiple of num_key_value_heads (2)"]),
    (lambda: trainer(small_model(), Layout(tp=3)), ["layout.tp = 3", "num_attention_heads (8)", "divisor of 8"]),
    (lambda: trainer(small_model(heads=12), Layout(tp=6)), ["layout.tp = 6", "num_key_value_heads (4)", "divisor of 4"]),
    (lambda: trainer(small_model(), Layout(pp=3)), ["layout.pp = 3", "num_hidden_layers (2)", "divisor of 2"]),
    (lambda: trainer(small_model(layers=4), Layout(pp=2, vpp=4)), ["layout.vpp = 4", "of a pipeline stage (2)", "divisor of 2"]),
    (lambda: trainer(small_model(), Layout(ep=2, dp=2)), ["layout.ep = 2", "qwen3 has none", "train.layout.ep = 1"]),
    (lambda: trainer(SMALL_MOE, Layout(ep=3, dp=3)), ["layout.ep = 3", "the number of experts (4)", "divisor of 4"]),
    (lambda: build_sglang_shards(SMALL_MOE, 4, 0, 3), ["rollout.ep = 3", "rollout.tp (4)", "divisor of 4"]),
    (lambda: build_sglang_shards(SMALL_MOE, 8, 0, 8), ["rollout.ep = 8", "experts (4)", "divisor"]),
    (lambda: build_sglang_shards(small_model(), 2, 0, 2), ["rollout.ep = 2", "qwen3 has none", "rollout.ep = 1"]),
    (lambda: build_sglang_shards(PARTLY_DENSE, 1, 0), ["layers without experts = [1]", "every layer", "without dense layers"]),
    (lambda: trainer(small_model(ffn=1025), Layout(tp=2)), ["layout.tp = 2", "1025 rows of model.layers.0.mlp.gate_proj", "smaller"]),
    (lambda: build_sglang_shards(small_model(), 3, 0), ["rollout.tp = 3", "num_attention_heads (8)", "divisor of 8"]),
    (lambda: build_sglang_shards(small_model(heads=12), 6, 0), ["rollout.tp = 6", "num_key_value_heads (4)", "multiple of it"]),
    (lambda: Layout(tp=0), ["layout.tp = 0: must be a positive integer"]),
    (lambda: Layout(dp=1.5), ["layout.dp = 1.5: must be a positive integer"]),  # type: ignore[arg-type]
    (lambda: Layout(vpp=2), ["layout.vpp = 2: needs more than one pipeline stage"]),
    (lambda: Layout(tp=4, ep=2), ["layout.ep = 2: ep * etp = 2 * 4 must divide tp * cp * dp = 4 * 1 * 1", "set train.layout.etp = 1"]),
    (lambda: Layout(tp=4, etp=3), ["layout.etp = 3: must divide tp * cp * dp = 4"]),
    *((lambda field=field: read(**{field: None}), [f"{field} = None: is missing"]) for field in FIELDS),
    *((lambda n=n: read(hidden_size=n), [f"hidden_size = {n}: must be a positive integer"]) for n in (0, -1, "256", True, 2.0)),
])  # fmt: skip
def test_impossible_layouts_are_refused_with_names_numbers_and_a_fix(refused, words):
    with pytest.raises(GeometryError) as caught:
        refused()
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tp, per_rank, filled", [(1, 301, [301]), (2, 151, [151, 150]), (4, 76, [76, 76, 76, 73])])
def test_megatron_pads_the_vocabulary_to_a_multiple_of_tp(tp, per_rank, filled):
    shards = [shards[0] for shards in trainer(small_model(vocab=301), Layout(tp=tp))]
    assert [shard.rows for shard in shards] == [per_rank] * tp
    assert [sum(region.tensor_rect.rows for region in shard.regions) for shard in shards] == filled  # the rows below are padding


def test_experts_of_megatron_and_sglang():
    source = slow_cut.checkpoint(SMALL_MOE)
    experts = "model.layers.0.mlp.experts."
    gate, up, down = ([source[f"{experts}{expert}.{part}_proj.weight"] for expert in range(4)] for part in ("gate", "up", "down"))
    for rank, shards in enumerate(trainer(SMALL_MOE, Layout(tp=2, ep=2, etp=1))):
        tensors = slow_cut.cut(shards, source)
        for expert in (2 * rank, 2 * rank + 1):
            prefix = f"decoder.layers.0.mlp.experts.local_experts.{expert}."
            assert np.array_equal(tensors[prefix + "linear_fc1.weight"], np.concatenate([gate[expert], up[expert]]))
            assert np.array_equal(tensors[prefix + "linear_fc2.weight"], down[expert])
        assert sum("local_experts" in name for name in names(shards)) == 4
    for rank in range(4):  # tp 4, ep 2: ranks 0 and 1 share experts 0 and 1
        shards = {shard.name: shard for shard in build_sglang_shards(SMALL_MOE, 4, rank, ep=2)}
        w13, w2 = (shards[f"{experts}{name}_weight"] for name in ("w13", "w2"))
        assert (w13.shape, w13.scale_shape(FP8), w2.shape, w2.scale_shape(FP8)) == ((2, 256, 256), (2, 2, 2), (2, 256, 128), (2, 2, 1))
        tensors = slow_cut.cut([w13, w2], source)
        mine, half = range(rank // 2 * 2, rank // 2 * 2 + 2), slice(rank % 2 * 128, rank % 2 * 128 + 128)
        expected = np.stack([np.concatenate([gate[expert][half], up[expert][half]]) for expert in mine])
        assert np.array_equal(tensors[w13.name].reshape(w13.shape), expected)
        assert np.array_equal(tensors[w2.name].reshape(w2.shape), np.stack([down[expert][:, half] for expert in mine]))


@given(st.integers(2, 9), st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 0, 1, 2, 5]), st.sampled_from([0, 0, 1, 2, 5]))
def test_stages_match_megatron(pp, vpp, share, first, last):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    assume(pp > 2 or not (first and last))
    layers = vpp * (first + last + share * (pp - (first > 0) - (last > 0)))
    layout = Layout(pp=pp, vpp=vpp, first_stage_layers=vpp * first, last_stage_layers=vpp * last)
    options = layout_options(layout, TrainConfig()) | {"pipeline_dtype": torch.float32, "moe_token_dispatcher_type": "alltoall"}
    config = TransformerConfig(num_layers=layers, hidden_size=8, num_attention_heads=1, **options)
    check_stages(layers, layout)
    for stage in range(layout.pp):
        expected = []
        for part in range(layout.vpp) if layout.vpp > 1 else [None]:
            start = get_transformer_layer_offset(config, part, stage)
            expected += range(start, start + get_num_layers_to_build(config, part, stage))
        assert list_stage_layers(layers, layout, stage) == expected
    assert sorted(layer for stage in range(layout.pp) for layer in list_stage_layers(layers, layout, stage)) == list(range(layers))


@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 3), st.floats(0, 5))
def test_balanced_stages_minimize_the_slowest_stage(layers, pp, vpp, output_layer):
    assume(pp > 1 or vpp == 1)

    def sizes_of(split: tuple[int, int]) -> list[int]:
        layout = Layout(pp=pp, vpp=vpp, first_stage_layers=split[0], last_stage_layers=split[1])
        check_stages(layers, layout)
        return count_stage_layers(layers, layout)

    def pace(sizes: list[int]) -> float:
        return max(*sizes, sizes[-1] + output_layer)

    balanced = balance_stages(layers, pp, vpp, output_layer)
    if layers % (pp * vpp) == 0:
        assert balanced is not None and pace(sizes_of(balanced)) <= pace([layers // pp] * pp)
        assert output_layer > 1 or balanced == (0, 0)
    if balanced is not None:
        assert sum(sizes_of(balanced)) == layers and min(sizes_of(balanced)) > 0


@pytest.mark.parametrize("layers, pp, output_layer, sizes", [
    (94, 8, 1, [11, *[12] * 6, 11]),
    (94, 8, 2.3, [*[12] * 7, 10]),
    (94, 4, 1, [23, 24, 24, 23]),
    (64, 4, 3.4, [17, 17, 17, 13]),
    (61, 16, 1, [2, *[4] * 14, 3]),
    (61, 2, 1, [31, 30]),
    (5, 3, 1, [2, 2, 1]),
])  # fmt: skip
def test_the_first_and_the_last_stage_are_smaller(layers, pp, output_layer, sizes):
    first, last = balance_stages(layers, pp, 1, output_layer) or (0, 0)
    assert count_stage_layers(layers, Layout(pp=pp, first_stage_layers=first, last_stage_layers=last)) == sizes


BALANCED = "use train.layout.first_stage_layers = 11 and train.layout.last_stage_layers = 11"


@pytest.mark.parametrize(
    "sizes, line",
    [
        ({"pp": 8}, f"pp = 8: must divide num_hidden_layers (94); use a divisor of 94, or {BALANCED[4:]}"),
        ({"pp": 100}, "pp = 100: must divide num_hidden_layers (94); use a divisor of 94"),
        ({"pp": 8, "first_stage_layers": 12},
         f"first_stage_layers = 12: leaves 82 of 94 layers, which 7 other stages cannot share equally; {BALANCED}"),
        ({"pp": 8, "first_stage_layers": 4, "last_stage_layers": 90},
         "first_stage_layers = 4: leaves 0 of 94 layers with train.layout.last_stage_layers = 90, which 6 other stages "
         f"cannot share equally; {BALANCED}"),
        ({"pp": 2, "last_stage_layers": 94},
         "last_stage_layers = 94: leaves 0 of 94 layers, which 1 other stage cannot share equally; use train.layout.last_stage_layers = 0"),
        ({"pp": 8, "vpp": 2, "first_stage_layers": 11, "last_stage_layers": 11},
         "vpp = 2: must divide the layers of a pipeline stage (11); use a divisor of 11"),
        ({"first_stage_layers": 2},
         "first_stage_layers = 2: needs more than one pipeline stage; set train.layout.pp above 1, or train.layout.first_stage_layers = 0"),
        ({"pp": 2, "first_stage_layers": 40, "last_stage_layers": 54},
         "last_stage_layers = 54: is determined by train.layout.first_stage_layers if there are two stages; leave one out"),
        ({"pp": 2, "last_stage_layers": -1}, "last_stage_layers = -1: must be a positive integer, or 0"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_in_one_line(sizes, line):
    with pytest.raises(GeometryError) as caught:
        check_stages(94, Layout(**sizes))
    assert str(caught.value) == f"train.layout.{line}"
