"""Every kind of tensor in the trainer's and the engine's layout: shapes, precision, and whether each FP8 block is whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_rl.planner.candidate import Candidate, Workload
from parallel.formats import SCHEMES
from parallel.layout_hints import keep_one_layer_per_kind
from parallel.megatron_shards import build_megatron_shards
from parallel.reshard import kind_of
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Shard, find_misaligned_region


@dataclass(frozen=True)
class ParameterAlignment:
    """One kind of parameter of trainer or engine; layers and experts of one kind are alike."""

    side: str
    name: str
    shape: tuple[int, ...]
    """On one rank."""
    kind: str
    scales: tuple[int, ...]
    """Empty where it is not quantized."""
    cut: str
    """The first region that cuts an FP8 block; "" where all are whole."""


def check_alignment(job: Workload, candidate: Candidate) -> list[ParameterAlignment]:
    """Return both sides' parameters. Raise GeometryError where a layout does not divide the model."""
    model, quantized = keep_one_layer_per_kind(job.model), bool(job.contract.fp8_roles)
    train = replace(candidate.train, pp=1, vpp=1)
    trainer = (
        build_megatron_shards(model, train, train.coordinates(rank), quantized=quantized) for rank in range(train.tp * train.cp * train.dp)
    )
    engine = build_engine_shards(model, candidate.rollout_tp, candidate.rollout_ep).values()
    return _align_side(job, "trainer", trainer) + _align_side(job, "engine", engine)


def _align_side(job: Workload, side: str, ranks: Iterable[list[Shard]]) -> list[ParameterAlignment]:
    rows: dict[str, ParameterAlignment] = {}
    roles, int8_roles = job.contract.fp8_roles, job.contract.int8_roles
    for shards in ranks:
        for shard in shards:
            name = re.sub(r"\.(layers|local_experts)\.\d+\.", r".\1.*.", shard.name)
            if job.model.experts and job.model.experts.dense_layers and ".layers.0." in shard.name:
                name = name.replace(".layers.*.", ".layers.dense.")
            kind = kind_of(shard.role, roles, int8_roles)
            cut = _describe_cut(shard) if kind == "fp8" else ""
            if name not in rows or (cut and not rows[name].cut):
                scales = shard.scale_shape(kind) if kind in SCHEMES else ()
                rows[name] = ParameterAlignment(side, name, shard.shape, kind, scales, cut)
    return list(rows.values())


def _describe_cut(shard: Shard) -> str:
    region = find_misaligned_region(shard)
    if region is None:
        return ""
    row, col, height, width = region.tensor_rect
    return f"rows {row}..{row + height}, columns {col}..{col + width} of {region.tensor.name}"
