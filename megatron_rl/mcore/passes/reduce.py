"""Sums over ranks: data-parallel replicas have different sequences, and only the last pipeline stage has logits.

Tensor-parallel ranks have the same values already. A rank without values gives zeros, or no names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.batch.totals import Totals
from megatron_rl.distributed import gather_from_ranks

T = TypeVar("T")


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
        per_rank = gather_from_ranks(values, group)
        names = dict.fromkeys(name for rank_values in per_rank for name in rank_values)
        values = {name: sum(rank_values.get(name, 0.0) for rank_values in per_rank) for name in names}
    return values


def combine(totals: Totals) -> Totals:
    """Return the totals of all replicas; collective."""
    return Totals.merge(gather_from_replicas(totals))


def gather_from_replicas(value: T) -> list[T]:
    """Return every replica's small picklable value, which all ranks of a replica pass alike; collective."""
    return gather_from_ranks(value, parallel_state.get_data_parallel_group())


def merge_replicas(by_sample: dict[int, T]) -> dict[int, T]:
    """Return small picklable values of all replicas' samples, by the sample's number; collective."""
    return {number: value for part in gather_from_replicas(by_sample) for number, value in part.items()}


def sum_over_replicas(*numbers: float) -> list[float]:
    """Return sums over replicas of numbers that all ranks of a replica pass alike; collective."""
    return _reduce_numbers(numbers, dist.ReduceOp.SUM)


def sum_samples(rows: torch.Tensor, numbers: Sequence[int], count: int) -> torch.Tensor:
    """Return the sums [k] of rows float64 [own, k] of all replicas' samples, `numbers` of them here, added up in the order of the step's
    `count` samples whatever replica has which; collective."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    of_all = torch.zeros(count, rows.shape[1], dtype=torch.float64, device=device)
    of_all[torch.tensor(numbers, dtype=torch.long, device=device)] = rows.to(device)
    dist.all_reduce(of_all, group=parallel_state.get_data_parallel_group())
    return of_all.cpu().sum(0)


def max_over_replicas(number: int) -> int:
    """Return the largest replica's number; collective."""
    return int(_reduce_numbers([number], dist.ReduceOp.MAX)[0])


def _reduce_numbers(numbers: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(values, operation, group=parallel_state.get_data_parallel_group())
    return values.tolist()


def sum_stages(values: torch.Tensor) -> None:
    """Sum a tensor, in place, over the pipeline stages of a replica; collective."""
    dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())


def sum_replica(values: torch.Tensor) -> None:
    """Sum a tensor, in place, over all ranks of a replica; collective."""
    sum_stages(values)
    dist.all_reduce(values, group=parallel_state.get_tensor_and_context_parallel_group())


def _groups() -> tuple[dist.ProcessGroup, ...]:
    return parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group()
