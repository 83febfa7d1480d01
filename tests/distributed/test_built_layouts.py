"""Real Megatron models in many layouts: every rank has the coordinates and the named tensors of the geometry, with the checkpoint's own
FP8 blocks."""

from __future__ import annotations

import pytest
from support import megatron_models
from support.families import cut_everything

from parallel.families import FAMILIES
from parallel.layout import Layout

UNIFIED, ROLLOUT = {"mode": "fp8_unified", "high": "bf16"}, {"mode": "fp8_rollout", "high": "bf16"}
BF16, FP32_SCALES = {"mode": "bf16", "high": "fp32"}, UNIFIED | {"scale_format": "fp32"}
CASES = [
    *((name, cut_everything(name), UNIFIED) for name in FAMILIES),
    ("qwen3", Layout(pp=2, vpp=2, dp=2), FP32_SCALES),
    ("qwen3", Layout(tp=2, cp=2), ROLLOUT),
    ("qwen3", Layout(tp=4), BF16),  # more ranks than key-value heads
    ("qwen3", Layout(pp=2, first_stage_layers=3, dp=2), UNIFIED),
    ("qwen3_moe", Layout(pp=2, last_stage_layers=3, ep=2, dp=2), UNIFIED),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=2, dp=2), BF16),
    ("qwen3_moe", Layout(tp=2, ep=4, etp=1, dp=2), BF16),
    ("qwen3_moe", Layout(tp=2, pp=2, vpp=2, ep=2, etp=1), FP32_SCALES),
    ("deepseek_v3", Layout(pp=4), ROLLOUT),
    ("deepseek_direct_q", Layout(tp=4, ep=2, etp=2), BF16),
]
LONG_CASES = [
    ("llama", Layout(tp=2, dp=2), UNIFIED),
    ("qwen2", Layout(tp=2, pp=2), ROLLOUT),
    ("qwen2", Layout(tp=4), BF16),
    ("qwen3_moe", Layout(ep=2, dp=4), UNIFIED),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=1, dp=2), UNIFIED),
    ("qwen3_moe", Layout(etp=2, ep=2, dp=4), UNIFIED),
    ("deepseek_v3", Layout(dp=4, ep=4), UNIFIED),
    ("deepseek_direct_q", Layout(tp=2, pp=2, ep=1, etp=1), UNIFIED),
]


@pytest.mark.parametrize("name, layout, precision", [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)])
def test_named_tensors_are_the_checkpoints_blocks(worlds, model_folder, name, layout, precision):
    for rank, result in enumerate(worlds(4).call(megatron_models.compare_with_checkpoint, model_folder(name), layout, precision)):
        assert result["coordinates"] == vars(layout.coordinates(rank)), rank
        assert result["missing"] == result["surplus"] == result["different"] == [], rank
        assert result["fp8_layers"] == (result["scales"] if precision["mode"] == "fp8_unified" else 0), rank
        assert (result["scales"] > 0) == (precision["mode"] != "bf16"), rank
        assert result["computed"] == 0, "a model that is only synced holds no dequantized values"


def test_the_cases_use_every_dimension():
    assert {name for _, layout, _ in CASES for name, size in vars(layout).items() if size > 1} == set(vars(Layout()))
    assert all(layout.world_size == 4 for _, layout, _ in CASES + LONG_CASES)
