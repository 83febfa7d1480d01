"""Weights of a Megatron model told in Hugging Face terms: load a checkpoint into this rank's shards, and look at what a rank holds.

Both use the geometry of `parallel`; no layer names are known here beyond how Megatron numbers layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.distributed import raise_on_all_ranks
from megatron_rl.errors import UserError
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
from parallel.shards import GeometryError, Rect, Region, Shard, find_misaligned_region


def build_rank_shards(hf_config: dict[str, Any], layout: Layout, rank: int) -> list[Shard]:
    """What rank `rank` of `layout` holds. Raises UserError where model and layout do not fit."""
    try:
        return build_megatron_shards(ModelGeometry.from_hf_config(hf_config), layout, layout.coordinates(rank))
    except GeometryError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None


def load_checkpoint(model: ModelChunks, folder: Path, shards: list[Shard]) -> None:
    """Fills this rank's parameters from a Hugging Face checkpoint, each value cast to the parameter's dtype. Collective.

    FP8 layers adopt the blocks of an FP8 checkpoint byte for byte, and the optimizer steps from their values. A trainer that is not FP8
    starts from the dequantised values. Then in mode `fp8_rollout` the engine is given the blocks of those values, at version 0 as at any
    other: with pow2 scales and a checkpoint of such, the same values in every block (if not the same bytes: a block whose largest
    magnitude is at most 224 gets half the scale); with fp32 scales, or through `high = "bf16"`, values may move by one rounding.

    Raises UserError on every rank for what `HFCheckpoint` refuses.
    """
    broken = None
    try:
        hf_config = read_config(folder)
        checkpoint = HFCheckpoint(folder, hf_config)
        checkpoint.check(ModelGeometry.from_hf_config(hf_config))
        _load(model, checkpoint, shards)
    except UserError as error:
        broken = error
    raise_on_all_ranks(broken)


@torch.no_grad()
def _load(model: ModelChunks, checkpoint: HFCheckpoint, shards: list[Shard]) -> None:
    parameters = global_parameters(model)
    if parameters.keys() != {shard.name for shard in shards}:
        raise AssertionError(f"geometry and model disagree: {sorted(parameters.keys() ^ {shard.name for shard in shards})[:4]}")
    holders = _weight_holders(model)
    for shard in shards:
        layer: Any = holders.get(shard.name)
        tensors = [region.tensor for region in shard.regions]
        checkpoint.check_scales(tensors, getattr(layer, "scale_format", None))
        if hasattr(layer, "adopt") and checkpoint.has_fp8_blocks(tensors[0]):
            layer.adopt(_shard_blocks(checkpoint, reorder_for_quantization(shard), layer.weight.device))
            continue
        for region in shard.regions:
            view_rect(parameters[shard.name], get_shard_rect(region)).copy_(checkpoint.read_values(region))


def _shard_blocks(checkpoint: HFCheckpoint, shard: Shard, device: torch.device) -> Fp8Weight:
    """The blocks of a shard in quantised order, put together from the checkpoint's."""
    cut = find_misaligned_region(shard)
    if cut is not None:
        raise UserError(
            "train.layout", None, f"a shard boundary cuts a 128x128 FP8 block of {cut.tensor.name}", "use a smaller train.layout.tp"
        )
    data = torch.empty(shard.rows, shard.cols, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(count_blocks(shard.rows), count_blocks(shard.cols), device=device)
    for region in shard.regions:
        rect = get_shard_rect(region)
        found = checkpoint.read_blocks(region)
        view_rect(data, rect).copy_(found.data)
        view_rect(scale, get_scale_rect(rect)).copy_(found.scale)
    return Fp8Weight(data, scale)


def get_shard_rect(region: Region) -> Rect:
    """Where a region lies in its shard."""
    return Rect(region.shard_row, region.shard_col, region.tensor_rect.rows, region.tensor_rect.cols)


def global_parameters(model: ModelChunks) -> dict[str, torch.Tensor]:
    """This rank's parameters, and the correction biases of its routers: buffers in Megatron, weights of the checkpoint.

    Layers are numbered over the whole model rather than within the pipeline stage, experts likewise.
    """
    return {
        global_name(chunk, name): tensor
        for chunk in get_model_chunks(model)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if isinstance(tensor, torch.nn.Parameter) or name.endswith(".router.expert_bias")
    }


def set_row_orders(model: ModelChunks, geometry: ModelGeometry, layout: Layout) -> None:
    """Gives every linear_qkv its `row_order`, FP8 or not: int64 [N], or None where blocks lie right as they are."""
    coordinates = layout.coordinates(torch.distributed.get_rank())
    for name, module in _weight_holders(model).items():
        if name.endswith("linear_qkv.weight"):
            order = compute_row_order(geometry, layout, coordinates, name)
            module.row_order = None if order is None else torch.tensor(order)


def _weight_holders(model: ModelChunks) -> dict[str, Any]:
    """Global name of a weight -> the module that holds it."""
    return {
        global_name(chunk, f"{name}.weight"): module
        for chunk in get_model_chunks(model)
        for name, module in chunk.named_modules()
        if hasattr(module, "weight")
    }


def collect_named_tensors(model: ModelChunks, shards: list[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """What this rank gives to an engine or to an export, by global name: raw values, and for FP8 and INT8 roles bytes and scales.

    An FP8 layer gives the very blocks it computes with. Where the trainer is in high precision but the engine is not (`fp8_rollout`,
    `int8_rollout`), they are made here: see `quantize_shards`. Collective. Views of live memory where possible: read them again after
    every optimizer step. FP8 tensors lie in the quantised order of `parallel.megatron_shards`.
    """
    found = {name: tensor.detach() for name, tensor in global_parameters(model).items()}
    return found | quantize_shards(shards, found, _weight_holders(model), contract)


def build_own_shards(hf_config: dict[str, Any], layout: Layout) -> list[Shard]:
    """`build_rank_shards` of the calling process."""
    return build_rank_shards(hf_config, layout, torch.distributed.get_rank())
