"""Weights of a Megatron model told in Hugging Face terms: load a checkpoint into this rank's shards, and look at what a rank holds.

Both use the geometry of `parallel`; no layer names are known here beyond how Megatron numbers layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.distributed import raise_together
from megatron_rl.errors import UserError
from megatron_rl.hf import write
from megatron_rl.hf.read import Checkpoint
from megatron_rl.mcore.names import Model, chunks_of, global_name
from megatron_rl.mcore.rollout_weights import quantised_planes
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import Blocks
from parallel.digest import region
from parallel.formats import blocks_in
from parallel.layout import Layout
from parallel.megatron_shards import in_quantised_order, megatron_shards, row_order
from parallel.model_geometry import GeometryError, ModelGeometry, Piece, Rect, Shard
from parallel.reshard import blocks as block_rect
from parallel.shards import cut_piece


def rank_shards(hf_config: dict[str, Any], layout: Layout, rank: int) -> list[Shard]:
    """What rank `rank` of `layout` holds. Raises UserError where model and layout do not fit."""
    try:
        return megatron_shards(ModelGeometry.from_hf_config(hf_config), layout, layout.coordinates(rank))
    except GeometryError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None


def load_checkpoint(model: Model, folder: Path, shards: list[Shard]) -> None:
    """Fills this rank's parameters from a Hugging Face checkpoint, each value cast to the parameter's dtype. Collective.

    FP8 layers adopt the blocks of an FP8 checkpoint byte for byte, and the optimizer steps from their values. A trainer that is not FP8
    starts from the dequantised values. Then in mode `fp8_rollout` the engine is given the blocks of those values, at version 0 as at any
    other: with pow2 scales and a checkpoint of such, the same values in every block (if not the same bytes: a block whose largest
    magnitude is at most 224 gets half the scale); with fp32 scales, or through `high = "bf16"`, values may move by one rounding.

    Raises UserError on every rank for what `Checkpoint` refuses.
    """
    broken = None
    try:
        hf_config = write.read_config(folder)
        checkpoint = Checkpoint(folder, hf_config)
        checkpoint.check(ModelGeometry.from_hf_config(hf_config))
        _load(model, checkpoint, shards)
    except UserError as error:
        broken = error
    raise_together(broken)


@torch.no_grad()
def _load(model: Model, checkpoint: Checkpoint, shards: list[Shard]) -> None:
    parameters = global_parameters(model)
    if parameters.keys() != {shard.name for shard in shards}:
        raise AssertionError(f"geometry and model disagree: {sorted(parameters.keys() ^ {shard.name for shard in shards})[:4]}")
    holders = _weight_holders(model)
    for shard in shards:
        layer: Any = holders.get(shard.name)
        tensors = [piece.tensor for piece in shard.pieces]
        checkpoint.check_scales(tensors, getattr(layer, "scale_format", None))
        if hasattr(layer, "adopt") and checkpoint.holds_blocks(tensors[0]):
            layer.adopt(_shard_blocks(checkpoint, in_quantised_order(shard), layer.weight.device))
            continue
        for piece in shard.pieces:
            region(parameters[shard.name], piece_rect(piece)).copy_(checkpoint.values(piece))


def _shard_blocks(checkpoint: Checkpoint, shard: Shard, device: torch.device) -> Blocks:
    """The blocks of a shard in quantised order, put together from the checkpoint's."""
    cut = cut_piece(shard)
    if cut is not None:
        raise UserError(
            "train.layout", None, f"a shard boundary cuts a 128x128 FP8 block of {cut.tensor.name}", "use a smaller train.layout.tp"
        )
    data = torch.empty(shard.rows, shard.cols, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(blocks_in(shard.rows), blocks_in(shard.cols), device=device)
    for piece in shard.pieces:
        rect = piece_rect(piece)
        found = checkpoint.blocks(piece)
        region(data, rect).copy_(found.data)
        region(scale, block_rect(rect)).copy_(found.scale)
    return Blocks(data, scale)


def piece_rect(piece: Piece) -> Rect:
    """Where a piece lies in its shard."""
    return Rect(piece.row, piece.col, piece.source.rows, piece.source.cols)


def global_parameters(model: Model) -> dict[str, torch.Tensor]:
    """This rank's parameters, and the correction biases of its routers: buffers in Megatron, weights of the checkpoint.

    Layers are numbered over the whole model rather than within the pipeline stage, experts likewise.
    """
    return {
        global_name(chunk, name): tensor
        for chunk in chunks_of(model)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if isinstance(tensor, torch.nn.Parameter) or name.endswith(".router.expert_bias")
    }


def set_row_orders(model: Model, geometry: ModelGeometry, layout: Layout) -> None:
    """Gives every linear_qkv its `row_order`, FP8 or not: int64 [N], or None where blocks lie right as they are."""
    place = layout.coordinates(torch.distributed.get_rank())
    for name, module in _weight_holders(model).items():
        if name.endswith("linear_qkv.weight"):
            order = row_order(geometry, layout, place, name)
            module.row_order = None if order is None else torch.tensor(order)


def _weight_holders(model: Model) -> dict[str, Any]:
    """Global name of a weight -> the module that holds it."""
    return {
        global_name(chunk, f"{name}.weight"): module
        for chunk in chunks_of(model)
        for name, module in chunk.named_modules()
        if hasattr(module, "weight")
    }


def planes(model: Model, shards: list[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """What this rank gives to an engine or to an export, by global name: raw values, and for FP8 and INT8 roles bytes and scales.

    An FP8 layer gives the very blocks it computes with. Where the trainer is in high precision but the engine is not (`fp8_rollout`,
    `int8_rollout`), they are made here: see `quantised_planes`. Collective. Views of live memory where possible: read them again after
    every optimizer step. FP8 planes lie in the quantised order of `parallel.megatron_shards`.
    """
    found = {name: tensor.detach() for name, tensor in global_parameters(model).items()}
    return found | quantised_planes(shards, found, _weight_holders(model), contract)


def this_rank_shards(hf_config: dict[str, Any], layout: Layout) -> list[Shard]:
    """`rank_shards` of the calling process."""
    return rank_shards(hf_config, layout, torch.distributed.get_rank())
