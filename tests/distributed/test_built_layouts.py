"""Real Megatron models in many layouts: every rank has the coordinates and the named tensors of the geometry, with the checkpoint's own
FP8 blocks."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from support.families import QUANTIZED, cut_everything
from support.trainer import load_model_chunks

from megatron_rl.config import PrecisionConfig
from megatron_rl.hf.checkpoint_format import find_stack
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import quantize
from parallel.digest import make_stored_tensors, raw_bytes, view_rect
from parallel.families import FAMILIES
from parallel.formats import MODES
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect

UNIFIED, ROLLOUT = {"mode": "fp8_unified", "high": "bf16"}, {"mode": "fp8_rollout", "high": "bf16"}
BF16, FP32_SCALES = {"mode": "bf16", "high": "fp32"}, UNIFIED | {"scale_format": "fp32"}
ONLY_ENGINE = [name for name, mode in MODES.items() if mode.engine and not mode.trainer]
INT8 = {"mode": "int8_rollout", "high": "bf16"}
CASES = [
    *((name, cut_everything(name), UNIFIED if name in QUANTIZED else BF16) for name in FAMILIES),
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
    # two ranks split o_proj and down_proj by columns; an INT8 channel's scale still covers the whole row
    *(("qwen3", Layout(tp=2, dp=2), {"mode": mode, "high": high}) for mode in ONLY_ENGINE for high in ("fp32", "bf16")),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=1, dp=2), INT8),  # ranks with different experts compute maxima independently
    ("qwen3_moe", Layout(tp=2, etp=2, dp=2), INT8),  # ranks that split an expert share them
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


def compare_with_checkpoint(folder, layout, precision):
    """Compare this rank's named tensors with the checkpoint's own blocks.

    Returns this rank's `coordinates` by Megatron; names that are `missing`, `surplus` or `different`; the number of `scales` and of
    `fp8_layers`, and of FP8 layers that hold dequantized values already (`computed`).
    """
    hf_config, contract = read_config(folder), PrecisionContract.from_config(PrecisionConfig(**precision))
    chunks = load_model_chunks(folder, contract, layout)
    shards = build_trainer_shards(ModelGeometry.from_hf_config(hf_config), layout, format_of=contract.format_of)[dist.get_rank()]
    tensors = collect_named_tensors(chunks, build_rank_shards(hf_config, layout, dist.get_rank()), contract)
    expected = _on_the_checkpoints_grid(folder, shards, contract)
    ranks = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
        "edp": parallel_state.get_expert_data_parallel_rank(),
    }
    return {
        "coordinates": ranks,
        "missing": sorted(expected.keys() - tensors.keys()),
        "surplus": sorted(tensors.keys() - expected.keys()),
        "different": [name for name in expected.keys() & tensors.keys() if not _same_bytes(tensors[name], expected[name])],
        "scales": sum(name.endswith(("_scale", "_scale_inv")) for name in expected),
        "fp8_layers": sum(len(find_quantized_layers(chunk)) for chunk in chunks),
        "computed": sum(layer.cached_operand is not None for chunk in chunks for layer in find_quantized_layers(chunk).values()),
    }


def _on_the_checkpoints_grid(folder, shards, contract):
    """Quantize every tensor whole, then cut it by the geometry's regions. A trainer without FP8 has no FP32 master, so its values are
    rounded first."""
    high = getattr(torch, contract.high_format.dtype)
    expected = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for shard in shards:
            format = contract.format_of(shard.role)
            expected |= make_stored_tensors([shard], contract.format_of)
            for region in shard.regions:
                stack, part = find_stack(region.tensor.name) or (region.tensor.name, None)
                value = file.get_tensor(stack) if part is None else file.get_tensor(stack)[part].t()
                if format.quantized:
                    grid = quantize(value if contract.trainer_format.quantized else value.to(high), format)
                    _copy(expected[shard.name], region.shard_rect, grid.data, region.tensor_rect)
                    _copy(
                        expected[format.scale_name(shard.name)],
                        get_scale_rect(region.shard_rect, format),
                        grid.scale,
                        get_scale_rect(region.tensor_rect, format),
                    )
                else:
                    _copy(expected[shard.name], region.shard_rect, value.to(expected[shard.name].dtype), region.tensor_rect)
    return expected


def _copy(target, at, source, of):
    view_rect(target, at).copy_(view_rect(source, of))


def _same_bytes(tensor, other):
    return tensor.dtype == other.dtype and tensor.shape == other.shape and bool((raw_bytes(tensor) == raw_bytes(other)).all())


@pytest.mark.parametrize("name, layout, precision", [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)])
def test_named_tensors_are_the_checkpoints_blocks(worlds, model_folder, name, layout, precision):
    for rank, result in enumerate(worlds(4).call(compare_with_checkpoint, model_folder(name), layout, precision)):
        assert result["coordinates"] == vars(layout.coordinates(rank)), rank
        assert result["missing"] == result["surplus"] == result["different"] == [], rank
        assert result["fp8_layers"] == (result["scales"] if precision["mode"] == "fp8_unified" else 0), rank
        assert (result["scales"] > 0) == (precision["mode"] != "bf16"), rank
        assert result["computed"] == 0, "a model that is only synced holds no dequantized values"


def test_the_cases_use_every_dimension():
    assert {name for _, layout, _ in CASES for name, size in vars(layout).items() if size > 1} == set(vars(Layout()))
    assert all(layout.world_size == 4 for _, layout, _ in CASES + LONG_CASES)
