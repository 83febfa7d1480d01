"""Weights of a Megatron model told in Hugging Face terms: load a checkpoint into this rank's shards, and look at what a rank holds.

Both use the geometry of `parallel`; no layer names are known here beyond how Megatron numbers layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import UserError
from megatron_rl.fp8.quantize import quantize_weight
from megatron_rl.mcore.linear import in_order
from megatron_rl.mcore.names import global_name
from megatron_rl.precision import PrecisionContract
from parallel.geometry import GeometryError, ModelGeometry, Piece, Rect, Shard
from parallel.layout import Layout
from parallel.megatron import megatron_shards, row_order
from parallel.plan import scale_name
from parallel.regions import region

Model: TypeAlias = GPTModel | list[GPTModel]
"""A rank's model, or its virtual pipeline stages."""

INDEX = "model.safetensors.index.json"


def rank_shards(hf_config: dict[str, Any], layout: Layout, rank: int) -> list[Shard]:
    """What rank `rank` of `layout` holds. Raises UserError where model and layout do not fit."""
    try:
        return megatron_shards(ModelGeometry.from_hf_config(hf_config), layout, layout.coordinates(rank))
    except GeometryError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None


class Checkpoint:
    """The safetensors files of a Hugging Face checkpoint, read rectangle by rectangle."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        if index.is_file():
            self._file_of = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        else:
            single = folder / "model.safetensors"
            if not single.is_file():
                raise UserError("model.path", str(folder), "holds neither model.safetensors nor its index")
            self._file_of = {name: single for name in self._open(single).keys()}  # noqa: SIM118 - not a dict
        self._folder = folder

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(
                "model.path", str(path), f"cannot be read ({error})", "the file is missing, truncated or no safetensors file"
            ) from None

    def check(self, shards: list[Shard]) -> None:
        """Raises UserError, by name, for a tensor that is missing or has another shape than the config says."""
        for tensor in {piece.tensor.name: piece.tensor for shard in shards for piece in shard.pieces}.values():
            if tensor.name not in self._file_of:
                raise UserError("model.path", str(self._folder), f"tensor {tensor.name} is missing")
            shape = self._open(self._file_of[tensor.name]).get_slice(tensor.name).get_shape()
            wanted = [tensor.rows] if tensor.vector else [tensor.rows, tensor.cols]
            if shape != wanted:
                raise UserError("model.path", str(self._folder), f"tensor {tensor.name} has shape {shape}, config.json says {wanted}")

    def read(self, piece: Piece) -> torch.Tensor:
        """The piece's rectangle of its tensor, [rows, cols] (or [rows] for a vector), in the file's dtype."""
        name, rect = piece.tensor.name, piece.source
        view = self._open(self._file_of[name]).get_slice(name)
        if piece.tensor.vector:
            return view[rect.row : rect.row + rect.rows]
        return view[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]


def load_checkpoint(model: Model, folder: Path, shards: list[Shard]) -> None:
    """Fills this rank's parameters from a Hugging Face checkpoint, each value cast to the parameter's dtype.

    Raises UserError for missing tensors, wrong shapes, FP8 or otherwise unexpected dtypes, inf or NaN.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.check(shards)
    parameters = global_parameters(model)
    by_name = {shard.name: shard for shard in shards}
    if parameters.keys() != by_name.keys():
        raise AssertionError(f"geometry and model disagree: {sorted(parameters.keys() ^ by_name.keys())[:4]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            for piece in by_name[name].pieces:
                value = checkpoint.read(piece)
                if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                    raise UserError(
                        "model.path", str(folder), f"tensor {piece.tensor.name} is {value.dtype}", "give a BF16, FP16 or FP32 checkpoint"
                    )
                if not torch.isfinite(value).all():
                    raise UserError("model.path", str(folder), f"tensor {piece.tensor.name} holds inf or NaN")
                region(parameter, piece_rect(piece)).copy_(value)


def piece_rect(piece: Piece) -> Rect:
    """Where a piece lies in its shard."""
    return Rect(piece.row, piece.col, piece.source.rows, piece.source.cols)


def global_parameters(model: Model) -> dict[str, torch.Tensor]:
    """This rank's parameters, and the correction biases of its routers: buffers in Megatron, weights of the checkpoint.

    Layers are numbered over the whole model rather than within the pipeline stage, experts likewise.
    """
    return {
        global_name(chunk, name): tensor
        for chunk in _chunks(model)
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
        for chunk in _chunks(model)
        for name, module in chunk.named_modules()
        if hasattr(module, "weight")
    }


def _chunks(model: Model) -> list[GPTModel]:
    return model if isinstance(model, list) else [model]


def planes(model: Model, shards: list[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """What this rank gives to an engine or to an export, by global name: raw values, and for FP8 roles E4M3 bytes and scales.

    An FP8 layer gives the very blocks it computes with. Where the trainer is not FP8 but the engine is (`fp8_rollout`), the blocks
    are made here. Views of live memory where possible: read them again after every optimizer step. FP8 planes lie in the quantised
    order of `parallel.megatron`.
    """
    found = {name: tensor.detach() for name, tensor in global_parameters(model).items()}
    layers = _weight_holders(model)
    for shard in shards:
        if shard.role in contract.fp8_roles():
            layer = layers[shard.name]
            blocks = getattr(layer, "blocks", None)
            if blocks is None:
                blocks = quantize_weight(in_order(found[shard.name], getattr(layer, "row_order", None)), contract.scale_format)
            found[shard.name], found[scale_name(shard.name)] = blocks
    return found


def this_rank_shards(hf_config: dict[str, Any], layout: Layout) -> list[Shard]:
    """`rank_shards` of the calling process."""
    return rank_shards(hf_config, layout, torch.distributed.get_rank())
