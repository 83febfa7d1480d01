"""Published models: which are supported, which tensor-parallel sizes keep FP8 blocks whole, and which sizes a refusal suggests."""

import json
import re

import published_models
import pytest
from support.geometries import dense_config, published_model
from support.golden.slow_cut import as_fp8

from parallel.families import FAMILIES
from parallel.layout import EngineLayout, Layout
from parallel.layout_hints import add_layout_hints, find_engine_problem, find_nearest_engines, find_nearest_layouts, find_trainer_problem
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import GeometryError

WORKS = {  # tensor-parallel sizes of attention and MLP that work on both sides
    "Llama-3.1-8B": (1, 2, 4, 8),
    "Llama-3.1-70B": (1, 2, 4, 8),
    "Llama-3.2-1B": (1, 2, 4),
    "Qwen2.5-0.5B": (1,),
    "Qwen2.5-7B": (1, 2, 4),
    "Qwen2.5-32B": (1, 2, 4, 8),
    "Qwen3-0.6B": (1, 2, 4, 8),
    "Qwen3-8B": (1, 2, 4, 8),
    "Qwen3-32B": (1, 2, 4, 8),
    "GLM-4.5": (1, 2, 4),  # its shared expert is 1536 wide
    "GLM-4-9B-0414": (1,),
    "GLM-4-32B-0414": (1, 2, 4),
}
EXPERT_WORKS = {"Qwen3-30B-A3B": (1, 2), "Qwen3-235B-A22B": (1, 2, 4), "DeepSeek-V3": (1, 2, 4, 8, 16)}  # ranks that share one expert


@pytest.fixture(scope="module")
def rows():
    return published_models.describe_all()


def test_the_page_is_what_the_tool_writes(rows):
    """A change of support changes the page: run `python tools/published_models.py`, and check each changed row."""
    assert published_models.PAGE.read_text() == published_models.render(rows)


def test_every_family_has_published_models_and_most_sizes_are_known(rows):
    lines = [json.loads(line) for line in published_models.MODELS.read_text().splitlines()]
    supported = [row for row in rows if not row.refusal]
    assert {row.cells[0].split("`")[1] for row in supported} == set(FAMILIES) and len(supported) >= 40 and len(rows) - len(supported) >= 30
    unknown = [row.model for line, row in zip(lines, rows, strict=True) if not row.refusal and "published" not in line]
    assert unknown == ["zai-org/GLM-4.6", "zai-org/GLM-4.7", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"]


@pytest.mark.parametrize("name", WORKS)
def test_tensor_parallel_sizes_of_dense_layers(name):
    model = published_model(name)
    for tp in (1, 2, 4, 8):
        for problem in (find_trainer_problem(model, Layout(tp=tp), as_fp8), find_engine_problem(model, tp, 1, as_fp8)):
            assert (problem is None) == (tp in WORKS[name]), problem


@pytest.mark.parametrize("name", EXPERT_WORKS)
def test_tensor_parallel_sizes_of_experts_and_attention(name):
    """Megatron's attention stays at tp 4, and an engine without expert parallelism shards experts over tp. With expert parallelism,
    attention works at every size: the engine replicates whole heads, and Megatron's rows end on block edges."""
    model = published_model(name)
    for parts in (1, 2, 4, 8, 16):
        train = find_trainer_problem(model, Layout(tp=4, etp=parts, dp=4), as_fp8)
        engine = find_engine_problem(model, parts, 1, as_fp8)
        assert (train is None) == (engine is None) == (parts in EXPERT_WORKS[name]), (train, engine)
    for tp in (1, 2, 4, 8):
        assert find_trainer_problem(model, Layout(tp=tp, ep=tp, etp=1), as_fp8) is None
        assert find_engine_problem(model, tp, tp, as_fp8) is None


@pytest.mark.parametrize(
    "name, train, rollout, pattern",
    [
        ("Qwen2.5-7B", Layout(tp=4), (14, 1),
         r"rollout.tp = 14: must divide num_key_value_heads \(4\) .*; rollout layouts that work: tp=4 or tp=2; use a divisor of 4"),
        ("Llama-3.2-1B", Layout(tp=8), (1, 1),
         r"model.layers.0.self_attn.k_proj.weight = rows 0..64, columns 0..2048: a shard boundary cuts .* in .*linear_qkv.weight.*; "
         r"train layouts that work: tp=4 or tp=2; use"),
        ("Qwen3-235B-A22B", Layout(tp=4, pp=2, ep=4, etp=1, dp=1), (8, 1),
         r"model.layers.0.mlp.experts.0.gate_proj.weight = rows 0..192, columns 0..4096: .* in .*w13_weight.*; "
         r"rollout layouts that work: tp=4 ep=1 or tp=8 ep=2; use"),
        ("Qwen2.5-0.5B", Layout(tp=2), (2, 1),
         r"model.layers.0.self_attn.q_proj.weight = rows 0..448, .*; train layouts that work: tp=1; rollout layouts that work: tp=1; use"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_tensor_and_the_nearest_working_layouts(name, train, rollout, pattern):
    model = published_model(name)
    with pytest.raises(GeometryError) as caught:
        reshard(build_trainer_shards(model, train, format_of=as_fp8), build_engine_shards(model, *rollout), as_fp8)
    message = str(add_layout_hints(caught.value, model, train, EngineLayout(*rollout), as_fp8))
    assert re.match(pattern, message), message


def test_nearest_layouts_work_keep_the_number_of_ranks_and_may_not_exist():
    model, asked = published_model("Qwen3-30B-A3B"), Layout(tp=4, dp=8)
    assert find_trainer_problem(model, asked, as_fp8) is not None  # etp 4: 768 / 4 = 192
    layouts = find_nearest_layouts(model, asked, as_fp8)
    assert layouts == [Layout(tp=4, etp=2, dp=8), Layout(tp=2, etp=2, dp=16)]
    assert all(find_trainer_problem(model, layout, as_fp8) is None for layout in layouts)
    assert all(find_engine_problem(model, tp, ep, as_fp8) is None for tp, ep in find_nearest_engines(model, 8, 1, as_fp8))
    model = ModelGeometry.from_hf_config(dense_config("llama", 1, 256, 2, 2, 200, 64))
    assert find_nearest_layouts(model, Layout(), as_fp8) == [] == find_nearest_engines(model, 1, 1, as_fp8)
    suggested = str(add_layout_hints(find_trainer_problem(model, Layout(), as_fp8), model, Layout(), EngineLayout(), as_fp8))
    assert "train layouts that work: none; rollout layouts that work: none" in suggested


def test_attention_length():
    """By hand: 2 FLOPs per weight that a token meets (8 of 128 experts), against s (d_qk + d_v) per head and layer."""
    for name, layers, hidden, kv, mlp in (("Qwen3-32B", 64, 5120, 1024, 3 * 25600), ("Qwen3-235B-A22B", 94, 4096, 512, 8 * 3 * 1536 + 128)):
        weights = layers * hidden * (8192 + 2 * kv + 8192 + mlp) + hidden * 151936
        assert published_model(name).attention_length == pytest.approx(2 * weights / (layers * 64 * 256), rel=1e-4)
