"""Real Megatron models in many layouts: every rank gives the named tensors that the geometry says, with the checkpoint's own FP8 blocks,
and tensor- and expert-parallel ranks train as one process does."""

from __future__ import annotations

import pytest
from support import megatron_models
from support.families import cut_everything
from support.models import random_sequences, read_weights

from parallel.families import FAMILIES
from parallel.layout import Layout

UNIFIED = {"mode": "fp8_unified", "high": "bf16"}
CASES = [
    ("qwen3", Layout(pp=2, vpp=2, dp=2), UNIFIED | {"scale_format": "fp32"}),
    ("qwen3", Layout(tp=2, cp=2), {"mode": "fp8_rollout", "high": "bf16"}),
    *((name, cut_everything(name), UNIFIED) for name in FAMILIES),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=2, dp=2), {"mode": "bf16", "high": "fp32"}),
    ("qwen3_moe", Layout(tp=2, pp=2, vpp=2, ep=2, etp=1), UNIFIED | {"scale_format": "fp32"}),
    ("deepseek_v3", Layout(pp=4), {"mode": "fp8_rollout", "high": "bf16"}),
    ("qwen3", Layout(pp=2, first_stage_layers=3, dp=2), UNIFIED),
    ("qwen3_moe", Layout(pp=2, last_stage_layers=3, ep=2, dp=2), UNIFIED),
]
LONG_CASES = [
    ("llama", Layout(tp=2, dp=2), UNIFIED),
    ("qwen2", Layout(tp=2, pp=2), {"mode": "fp8_rollout", "high": "bf16"}),
    ("qwen3_moe", Layout(ep=2, dp=4), UNIFIED),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=1, dp=2), UNIFIED),
    ("qwen3_moe", Layout(etp=2, ep=2, dp=4), UNIFIED),
    ("deepseek_v3", Layout(dp=4, ep=2), UNIFIED),
    ("deepseek_direct_q", Layout(tp=2, pp=2, ep=1, etp=1), UNIFIED),
]


def mark_long(cases: list[tuple]) -> list:
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize("name, layout, precision", CASES + mark_long(LONG_CASES))
def test_named_tensors_are_the_checkpoints_blocks(worlds, model_folder, name, layout, precision):
    for rank, result in enumerate(worlds(4).call(megatron_models.compare_with_checkpoint, model_folder(name), layout, precision)):
        assert result["missing"] == result["surplus"] == result["different"] == [], rank
        assert result["fp8_layers"] == (result["scales"] if precision["mode"] == "fp8_unified" else 0), rank
        assert (result["scales"] > 0) == (precision["mode"] != "bf16"), rank
        assert result["computed"] == 0, "a model that is only synced holds no dequantised values"


TRAINED = [
    ("llama", Layout(tp=4)),
    ("glm4", Layout(tp=4)),
    ("qwen3_moe", Layout(tp=4, ep=2, etp=2)),
    ("qwen3_moe_raw_weights", Layout(tp=4, ep=4, etp=1)),
    ("deepseek_direct_q", Layout(tp=4, etp=2)),
]
LONG_TRAINED = [
    ("qwen2", Layout(tp=4)),
    ("qwen3_moe", Layout(tp=4)),
    ("qwen3_moe", Layout(tp=4, etp=1)),  # replicas of every expert within a tensor-parallel group
    ("qwen3_moe", Layout(tp=4, ep=2, etp=1)),
    ("deepseek_v3", Layout(tp=4, ep=2, etp=2)),
]


@pytest.mark.parametrize("name, layout", TRAINED + mark_long(LONG_TRAINED))
def test_four_ranks_train_as_one(worlds, model_folder, name, layout):
    # sequence parallelism, which experts need, cuts the batch's width: a multiple of four here
    seed = next(seed for seed in range(99) if max(sequence.length for sequence in random_sequences(4, seed)) % 4 == 1)
    batches, folder = [random_sequences(4, seed)] * 2, model_folder(name)
    steps_of_one, masters_of_one = worlds(1).call(megatron_models.train, folder, Layout(), batches)[0]
    steps, masters = worlds(4).call(megatron_models.train, folder, layout, batches)[0]
    for expected, step in zip(steps_of_one, steps, strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
    start = read_weights(folder)
    assert masters.keys() == masters_of_one.keys() == start.keys()
    for weight_name, weight in masters_of_one.items():
        change, difference = weight - start[weight_name], weight - masters[weight_name]
        assert (change.abs().max() > 1e-4) == (not weight_name.endswith("correction_bias")), weight_name  # that one stays
        assert difference.norm() <= 1e-3 * change.norm(), f"{weight_name}: the ranks took another path"


def test_the_cases_use_every_dimension():
    assert {name for _, layout, _ in CASES for name, size in vars(layout).items() if size > 1} == set(vars(Layout()))
    assert all(layout.world_size == 4 for _, layout, _ in CASES + LONG_CASES)
