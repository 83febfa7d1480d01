"""Shapes and precision of every kind of parameter in the trainer's and the engine's layout, and whether any quantized block is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.cost.workload import Candidate, Workload
from parallel.formats import TensorFormat
from parallel.layout_hints import keep_one_layer_per_kind
from parallel.megatron_shards import build_trainer_shards
from parallel.mtp_layers import MEGATRON_PREFIX
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Shard, find_misaligned_region


@dataclass(frozen=True)
class ParameterAlignment:
    """One kind of parameter of the trainer or the engine. Layers and experts of one kind are equal."""

    side: str
    name: str
    shape: tuple[int, ...]
    """Shape on one rank."""
    format: str
    scales: tuple[int, ...]
    """Shape of the scales, empty if the parameter is not quantized."""
    cut: str
    """The first region that cuts a block, or "" if all blocks are whole."""


def check_alignment(job: Workload, candidate: Candidate) -> list[ParameterAlignment]:
    """Return the parameters of both sides. Raise GeometryError if a layout does not divide the model."""
    model, format_of = keep_one_layer_per_kind(job.model), job.contract.format_of
    trainer = build_trainer_shards(model, candidate.train.one_stage, format_of=format_of).values()
    engine = build_engine_shards(model, candidate.rollout_tp, candidate.rollout_ep).values()
    return _align_side(job, "trainer", trainer) + _align_side(job, "engine", engine)


def _align_side(job: Workload, side: str, ranks: Iterable[list[Shard]]) -> list[ParameterAlignment]:
    rows: dict[str, ParameterAlignment] = {}
    for shards in ranks:
        for shard in shards:
            name = re.sub(r"\.(layers|local_experts)\.\d+\.", r".\1.*.", shard.name)
            dense = job.model.experts and job.model.experts.dense_layers and ".layers.0." in shard.name
            if dense and not shard.name.startswith(MEGATRON_PREFIX):
                name = name.replace(".layers.*.", ".layers.dense.")
            format = job.contract.format_of(shard.role)
            cut = _describe_cut(shard, format)
            if name not in rows or (cut and not rows[name].cut):
                rows[name] = ParameterAlignment(side, name, shard.shape, format.name, shard.scale_shape(format), cut)
    return list(rows.values())


def _describe_cut(shard: Shard, format: TensorFormat) -> str:
    region = find_misaligned_region(shard, format)
    if region is None:
        return ""
    row, col, height, width = region.tensor_rect
    return f"rows {row}..{row + height}, columns {col}..{col + width} of {region.tensor.name}"
