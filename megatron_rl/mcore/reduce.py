"""Sums over ranks: data-parallel replicas have different sequences, and only the last pipeline stage has logits.

Tensor-parallel ranks have the same values already. A rank without values gives zeros, or no names.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def sum_values(values: torch.Tensor) -> None:
    """Sum a tensor, in place, over data-parallel replicas and pipeline stages; collective."""
    for group in _groups():
        dist.all_reduce(values, group=group)


def sum_by_name(sums: dict[str, float | torch.Tensor]) -> dict[str, float]:
    """Sum numbers, scalar tensors of one device among them, by name over data-parallel replicas and pipeline stages; collective."""
    tensors = {name: value for name, value in sums.items() if isinstance(value, torch.Tensor)}
    numbers = torch.stack(list(tensors.values())).tolist() if tensors else []  # one wait for the device
    values = {**cast(dict[str, float], sums), **dict(zip(tensors, numbers, strict=True))}
    for group in _groups():
        gathered: list[dict[str, float] | None] = [None] * group.size()
        dist.all_gather_object(gathered, values, group=group)
        per_rank = cast(list[dict[str, float]], gathered)
        names = dict.fromkeys(name for rank_values in per_rank for name in rank_values)
        values = {name: sum(rank_values.get(name, 0.0) for rank_values in per_rank) for name in names}
    return values


def _groups() -> tuple[dist.ProcessGroup, ...]:
    return parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group()
