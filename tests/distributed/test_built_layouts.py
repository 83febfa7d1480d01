"""Real Megatron models in many layouts: every rank gives away the planes that the geometry says, with the checkpoint's own FP8 blocks,
and tensor- and expert-parallel ranks train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import megatron_models
from support.models import ARCHITECTURES, make_model, random_sequences, read_weights
from support.processes import World

from parallel.layout import Layout

UNIFIED = {"mode": "fp8_unified", "high": "bf16"}
CASES = [
    ("qwen3", Layout(tp=2, pp=2), UNIFIED),
    ("qwen3", Layout(pp=2, vpp=2, dp=2), UNIFIED | {"scale_format": "fp32"}),
    ("qwen3", Layout(tp=2, cp=2), {"mode": "fp8_rollout", "high": "bf16"}),
    ("llama", Layout(tp=2, dp=2), UNIFIED),
    ("qwen2", Layout(tp=2, pp=2), UNIFIED),
    ("qwen2", Layout(tp=2, pp=2), {"mode": "fp8_rollout", "high": "bf16"}),
    ("qwen3_moe", Layout(ep=2, dp=4), UNIFIED),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=1, dp=2), UNIFIED),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=2, dp=2), {"mode": "bf16", "high": "fp32"}),
    ("qwen3_moe", Layout(etp=2, ep=2, dp=4), UNIFIED),
    ("qwen3_moe", Layout(tp=2, pp=2, vpp=2, ep=2, etp=1), UNIFIED | {"scale_format": "fp32"}),
    ("deepseek_v3", Layout(dp=4, ep=2), UNIFIED),
    ("deepseek_v3", Layout(tp=2, pp=2, ep=2, etp=1), UNIFIED),
    ("deepseek_v3", Layout(pp=4), {"mode": "fp8_rollout", "high": "bf16"}),
    ("deepseek_direct_q", Layout(tp=2, pp=2, ep=1, etp=1), UNIFIED),
]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with World(4, tmp_path_factory.mktemp("world4")) as world:
        yield world


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp(name), ARCHITECTURES[name])
        return made[name]

    return folder


@pytest.mark.parametrize("name, layout, precision", CASES, ids=[f"{name}-{layout}-{how['mode']}" for name, layout, how in CASES])
def test_planes_are_the_checkpoints_blocks(four, folder_of, name, layout, precision):
    for rank, found in enumerate(four.call(megatron_models.compare_with_checkpoint, folder_of(name), layout, precision)):
        assert found["missing"] == found["surplus"] == found["different"] == [], rank
        assert found["fp8_layers"] == (found["scales"] if precision["mode"] == "fp8_unified" else 0), rank
        assert (found["scales"] > 0) == (precision["mode"] != "bf16"), rank
        assert found["computed"] == 0, "a model that is only synced holds no dequantised values"


TRAINED = [
    ("llama", Layout(tp=4)),
    ("qwen2", Layout(tp=4)),
    ("qwen3_moe", Layout(tp=4)),
    ("qwen3_moe", Layout(tp=4, etp=1)),  # replicas of every expert within a tensor-parallel group
    ("qwen3_moe", Layout(tp=4, ep=2, etp=1)),
    ("qwen3_moe_raw_weights", Layout(tp=4, ep=4, etp=1)),
    ("qwen3_moe", Layout(tp=4, ep=2, etp=2)),
    ("deepseek_v3", Layout(tp=4, ep=2, etp=2)),
    ("deepseek_direct_q", Layout(tp=4, etp=2)),
]


@pytest.mark.parametrize("name, layout", TRAINED, ids=[f"{name}-{layout}" for name, layout in TRAINED])
def test_four_ranks_train_as_one(one, four, folder_of, name, layout):
    # sequence parallelism, which experts need, cuts the batch's width: a multiple of four here
    seed = next(seed for seed in range(99) if max(sequence.length for sequence in random_sequences(4, seed)) % 4 == 1)
    batches, folder = [random_sequences(4, seed)] * 2, folder_of(name)
    alone, masters = one.call(megatron_models.train, folder, Layout(), batches)[0]
    together, others = four.call(megatron_models.train, folder, layout, batches)[0]
    for a, b in zip(alone, together, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    start = read_weights(folder)
    assert masters.keys() == others.keys() == start.keys()
    for weight_name, weight in masters.items():
        way, apart = weight - start[weight_name], weight - others[weight_name]
        assert (way.abs().max() > 1e-4) == (not weight_name.endswith("correction_bias")), weight_name  # that one stays
        assert apart.norm() <= 1e-3 * way.norm(), f"{weight_name}: the ranks took another path"


def test_the_cases_use_every_dimension():
    assert {name for _, layout, _ in CASES for name, size in vars(layout).items() if size > 1} == set(vars(Layout()))
    assert all(layout.world_size == 4 for _, layout, _ in CASES)
