"""Reshard an FP8 model from a Megatron layout into an SGLang layout without torch and without quantizing again."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parallel.formats import BF16, FP8, FP32, TensorFormat
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import add_scale_transfers, list_stored_tensors, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import FP32_ROLES

FP8_ROLES = ("attention_qkv", "attention_output", "mlp_in", "mlp_out")
Ranks = Mapping[int, Mapping[str, np.ndarray]]


def format_of(role: str) -> TensorFormat:
    """Return the format in which tensors of a role are stored."""
    return FP8 if role in FP8_ROLES else FP32 if role in FP32_ROLES else BF16


def reshard_model(hf_config: Mapping[str, Any], layout: Layout, tp: int, sources: Ranks) -> dict[int, dict[str, np.ndarray]]:
    """Return the parameters of an engine's `tp` ranks as {rank: {SGLang's name: [rows, cols]}}, experts stacked vertically.

    `sources` are the parameters and scales of all ranks of `layout` under Megatron's names, with layers numbered over the whole model, as
    [rows, cols] of one-byte (FP8), two-byte (BF16), and float32 items. Raise GeometryError if a block would be cut."""
    model = ModelGeometry.from_hf_config(hf_config)
    trainer, engine = build_trainer_shards(model, layout, format_of=format_of), build_engine_shards(model, tp)
    items = {BF16.dtype: np.uint16, FP8.dtype: np.uint8, FP32.dtype: np.float32}
    targets: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in engine}
    for rank, shards in engine.items():
        for name, (format, shape) in list_stored_tensors(shards, format_of).items():
            targets[rank][name] = np.zeros(shape, items[format.dtype]).reshape(-1, shape[-1] if shape[1:] else 1)
    for move in add_scale_transfers(reshard(trainer, engine, format_of)):
        values = sources[move.source_rank][move.source]
        (row, col, rows, cols), (to_row, to_col, *_) = move.source_rect, move.target_rect
        targets[move.target_rank][move.target][to_row : to_row + rows, to_col : to_col + cols] = values[row : row + rows, col : col + cols]
    return targets
