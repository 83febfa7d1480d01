"""What some ranks found, told to all: replicas have different sequences, and of a pipeline only the last stage has logits.

Tensor-parallel ranks know the same already. A rank that found nothing gives zeros, or no names.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def sum_values(values: torch.Tensor) -> None:
    """Sums a tensor, in place, over data-parallel replicas and pipeline stages; collective."""
    for group in _groups():
        dist.all_reduce(values, group=group)


def sum_by_name(values: dict[str, float]) -> dict[str, float]:
    """Sums numbers by name over data-parallel replicas and pipeline stages; collective."""
    for group in _groups():
        found: list[dict[str, float] | None] = [None] * group.size()
        dist.all_gather_object(found, values, group=group)
        parts = cast(list[dict[str, float]], found)
        values = {name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(name for part in parts for name in part)}
    return values


def _groups() -> tuple[dist.ProcessGroup, ...]:
    return parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group()
