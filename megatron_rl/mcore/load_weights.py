"""Weights of a Megatron model in Hugging Face terms: load a checkpoint into this rank's shards, and collect the tensors a rank holds.

Both use the geometry of `parallel`; no layer names are known here beyond how Megatron numbers layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.distributed import errors_on_all_ranks
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.mcore.names import ModelChunks, get_model_chunks, global_name
from megatron_rl.mcore.rollout_weights import quantize_shards
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import Fp8Weight
from parallel.digest import view_rect
from parallel.formats import count_blocks
from parallel.layout import Layout
from parallel.megatron_shards import build_megatron_shards, compute_row_order, reorder_for_quantization
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect
from parallel.shards import Shard, find_misaligned_region


def build_rank_shards(hf_config: dict[str, Any], layout: Layout, rank: int | None = None) -> list[Shard]:
    """Return the shards of a rank of `layout`, by default of this process. Raise UserError where model and layout do not fit."""
    rank = torch.distributed.get_rank() if rank is None else rank
    with as_user_error():
        return build_megatron_shards(ModelGeometry.from_hf_config(hf_config), layout, layout.coordinates(rank))


def load_checkpoint(model: ModelChunks, folder: Path, shards: list[Shard]) -> None:
    """Fill this rank's parameters from a Hugging Face checkpoint, each value cast to the parameter's dtype. Collective.

    FP8 layers adopt the blocks of an FP8 checkpoint byte for byte, and the optimizer steps from their values. A trainer that is not FP8
    starts from the dequantised values. In mode `fp8_rollout` the engine then gets the blocks of those values, at version 0 as at any
    other: with pow2 scales and a checkpoint with such scales, the same values in every block (not always the same bytes: a block whose
    largest magnitude is at most 224 gets half the scale); with fp32 scales, or through `high = "bf16"`, values may change by one rounding.

    Raises UserError on every rank for what `HFCheckpoint` refuses.
    """
    with errors_on_all_ranks():
        hf_config = read_config(folder)
        checkpoint = HFCheckpoint(folder, hf_config)
        checkpoint.check(ModelGeometry.from_hf_config(hf_config))
        _load(model, checkpoint, shards)


@torch.no_grad()
def _load(model: ModelChunks, checkpoint: HFCheckpoint, shards: list[Shard]) -> None:
    parameters = global_parameters(model)
    if parameters.keys() != {shard.name for shard in shards}:
        raise AssertionError(f"geometry and model disagree: {sorted(parameters.keys() ^ {shard.name for shard in shards})[:4]}")
    layers = _find_layers(model)
    for shard in shards:
        layer: Any = layers.get(shard.name)
        tensors = [region.tensor for region in shard.regions]
        checkpoint.check_scales(tensors, getattr(layer, "scale_format", None))
        if hasattr(layer, "adopt") and checkpoint.has_fp8_blocks(tensors[0]):
            layer.adopt(_read_shard_blocks(checkpoint, reorder_for_quantization(shard), layer.weight.device))
            continue
        for region in shard.regions:
            view_rect(parameters[shard.name], region.shard_rect).copy_(checkpoint.read_values(region))


def _read_shard_blocks(checkpoint: HFCheckpoint, shard: Shard, device: torch.device) -> Fp8Weight:
    """Read the blocks of a shard in quantised order from the checkpoint's."""
    misaligned = find_misaligned_region(shard)
    if misaligned is not None:
        rule = f"a shard boundary cuts a 128x128 FP8 block of {misaligned.tensor.name}"
        raise UserError("train.layout", None, rule, "use a smaller train.layout.tp")
    data = torch.empty(shard.rows, shard.cols, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(count_blocks(shard.rows), count_blocks(shard.cols), device=device)
    for region in shard.regions:
        blocks = checkpoint.read_blocks(region)
        view_rect(data, region.shard_rect).copy_(blocks.data)
        view_rect(scale, get_scale_rect(region.shard_rect)).copy_(blocks.scale)
    return Fp8Weight(data, scale)


def global_parameters(model: ModelChunks) -> dict[str, torch.Tensor]:
    """Return this rank's parameters by global name (see `mcore.names`), with its routers' correction biases: buffers in Megatron,
    weights in the checkpoint.
    """
    return {
        global_name(chunk, name): tensor
        for chunk in get_model_chunks(model)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if isinstance(tensor, torch.nn.Parameter) or name.endswith(".router.expert_bias")
    }


def set_row_orders(model: ModelChunks, geometry: ModelGeometry, layout: Layout) -> None:
    """Set `row_order` of every linear_qkv, FP8 or not: int64 [N], or None where the parameter's own order keeps blocks whole."""
    coordinates = layout.coordinates(torch.distributed.get_rank())
    for name, layer in _find_layers(model).items():
        if name.endswith("linear_qkv.weight"):
            order = compute_row_order(geometry, layout, coordinates, name)
            layer.row_order = None if order is None else torch.tensor(order)


def _find_layers(model: ModelChunks) -> dict[str, Any]:
    """Return global name of a weight -> the layer that holds it."""
    return {
        global_name(chunk, f"{name}.weight"): module
        for chunk in get_model_chunks(model)
        for name, module in chunk.named_modules()
        if hasattr(module, "weight")
    }


def collect_named_tensors(model: ModelChunks, shards: list[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """Return the tensors that an engine or an export gets from this rank, by global name: raw values; bytes and scales of FP8 and INT8
    roles. Collective.

    The bytes of an FP8 layer are the very blocks it computes with. Where the trainer is in high precision but the engine is not
    (`fp8_rollout`, `int8_rollout`), `quantize_shards` makes them here. Views of live memory where possible: call again after every
    optimizer step. Rows of FP8 tensors are in the quantised order of `parallel.megatron_shards`.
    """
    weights = {name: tensor.detach() for name, tensor in global_parameters(model).items()}
    return weights | quantize_shards(shards, weights, _find_layers(model), contract)
