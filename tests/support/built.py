"""Real Megatron models in any layout, run in the ranks of a `World`: what each rank would give away, held against the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import PrecisionConfig, TrainConfig
from megatron_rl.hf import write
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.export import gather_tensors
from megatron_rl.mcore.layers.fp8_linear import find_fp8_layers, quantize_model
from megatron_rl.mcore.load_weights import build_rank_shards, collect_named_tensors, get_shard_rect, load_checkpoint
from megatron_rl.mcore.model import build_model, start_megatron
from megatron_rl.mcore.names import get_model_chunks
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from parallel.digest import raw_bytes, view_rect
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect, kind_of, scale_name
from parallel.shards import Rect, Shard
from support.trainer import TRAIN, leave_layout, negative_log_likelihood


def restart_megatron(layout: Layout) -> None:
    """Makes Megatron's groups anew; the processes stay."""
    leave_layout()
    start_megatron(layout, seed=0)
    torch.set_num_threads(1)


def train(folder: Path, layout: Layout, batches: list[list[TrainingSample]]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Supervised steps in FP32: what each step returned, and on rank 0 the weights afterwards under Hugging Face names.

    Adam's epsilon is far above rounding noise, so that a gradient that is almost zero is not turned into a whole step.
    """
    restart_megatron(layout)
    hf_config, contract = write.read_config(folder), PrecisionContract.from_config(PrecisionConfig(mode="bf16", high="fp32"))
    shards = build_rank_shards(hf_config, layout, dist.get_rank())
    model = build_model(hf_config, layout, contract)
    load_checkpoint(model, folder, shards)
    actor = Actor(model, TrainConfig(**TRAIN, adam_eps=1e-4), temperature=1.0)
    steps = [actor.update(batch, negative_log_likelihood) for batch in batches]
    geometry = ModelGeometry.from_hf_config(hf_config)
    return steps, gather_tensors(collect_named_tensors(model, shards, contract), geometry, layout, frozenset(), "fp32")


def load_model_chunks(folder: Path, contract: PrecisionContract, layout: Layout) -> list[Any]:
    """This rank's virtual pipeline stages, built, loaded and quantised."""
    restart_megatron(layout)
    hf_config = write.read_config(folder)
    chunks = get_model_chunks(build_model(hf_config, layout, contract))
    load_checkpoint(chunks, folder, build_rank_shards(hf_config, layout, dist.get_rank()))
    for chunk in chunks:
        quantize_model(chunk)
    return chunks


def compare_with_checkpoint(folder: Path, layout: Layout, precision: dict[str, Any]) -> dict[str, Any]:
    """Builds, loads and quantises this rank's part, then holds its named_tensors against the checkpoint's own grid.

    Returns `missing` and `surplus` names, the names that are `different`, and how many tensors there are of each kind; `computed` FP8
    layers hold dequantised values already.
    """
    hf_config, contract = write.read_config(folder), PrecisionContract.from_config(PrecisionConfig(**precision))
    chunks = load_model_chunks(folder, contract, layout)
    shards = build_trainer_shards(ModelGeometry.from_hf_config(hf_config), layout, quantised=contract.rollout_fp8)[dist.get_rank()]
    found = collect_named_tensors(chunks, shards, contract)
    expected = _on_the_checkpoints_grid(folder, shards, contract)
    return {
        "missing": sorted(expected.keys() - found.keys()),
        "surplus": sorted(found.keys() - expected.keys()),
        "different": [name for name in expected.keys() & found.keys() if not _same_bytes(found[name], expected[name])],
        "scales": sum(name.endswith("_scale_inv") for name in expected),
        "fp8_layers": sum(len(find_fp8_layers(chunk)) for chunk in chunks),
        "computed": sum(layer._operand is not None for chunk in chunks for layer in find_fp8_layers(chunk).values()),
    }


def _on_the_checkpoints_grid(folder: Path, shards: list[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """Every tensor quantised whole, then cut by the geometry's regions. A trainer without FP8 has no FP32 master: it rounds first."""
    high = {"bf16": torch.bfloat16, "fp32": torch.float32}[contract.high]
    found: dict[str, torch.Tensor] = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for shard in shards:
            kind = kind_of(shard.role, contract.fp8_roles())
            dtype = {"fp8": torch.float8_e4m3fn, "fp32": torch.float32, "high": high}[kind]
            found[shard.name] = torch.zeros(shard.shape, dtype=dtype)
            if kind == "fp8":
                found[scale_name(shard.name)] = torch.zeros(shard.scale_shape)
            for region in shard.regions:
                value = file.get_tensor(region.tensor.name)
                if kind == "fp8":
                    grid = quantize_weight(value if contract.train_fp8 else value.to(high), contract.scale_format)
                    _copy(found[shard.name], get_shard_rect(region), grid.data, region.tensor_rect)
                    _copy(
                        found[scale_name(shard.name)],
                        get_scale_rect(get_shard_rect(region)),
                        grid.scale,
                        get_scale_rect(region.tensor_rect),
                    )
                else:
                    _copy(found[shard.name], get_shard_rect(region), value.to(dtype), region.tensor_rect)
    return found


def _copy(target: torch.Tensor, at: Rect, source: torch.Tensor, of: Rect) -> None:
    view_rect(target, at).copy_(view_rect(source, of))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((raw_bytes(one) == raw_bytes(other)).all())
