"""Sums over ranks. Replicas hold different sequences, and only the last pipeline stage has logits; tensor-parallel ranks hold equal values.

A rank without values passes zeros or no names. All functions are collective.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl import distributed
from megatron_rl.batch.totals import Total, Totals
from megatron_rl.distributed import gather_from_ranks

T = TypeVar("T")


def sum_values(values: torch.Tensor) -> None:
    """Sum a tensor in place over data-parallel replicas and pipeline stages."""
    for group in _groups():
        dist.all_reduce(values, group=group)


def sum_by_name(sums: dict[str, float | torch.Tensor]) -> dict[str, float]:
    """Sum numbers and scalar tensors (of one device) by name over data-parallel replicas and pipeline stages."""
    tensors = {name: value for name, value in sums.items() if isinstance(value, torch.Tensor)}
    numbers = torch.stack(list(tensors.values())).tolist() if tensors else []  # waits for the device once
    values = {**cast(dict[str, float], sums), **dict(zip(tensors, numbers, strict=True))}
    for group in _groups():
        per_rank = gather_from_ranks(values, dict[str, float], group)
        names = dict.fromkeys(name for rank_values in per_rank for name in rank_values)
        values = {name: sum(rank_values.get(name, 0.0) for rank_values in per_rank) for name in names}
    return values


def combine(totals: Totals) -> Totals:
    """Return the combined totals of all replicas."""
    return Totals.merge(map(Totals, gather_from_replicas(totals.by_name, dict[str, Total])))


def gather_from_replicas(value: T, kind: Any) -> list[T]:
    """Return the small value, of type `kind`, of every replica. All ranks of a replica pass the same value."""
    return gather_from_ranks(value, kind, parallel_state.get_data_parallel_group())


def gather_numbers(values: np.ndarray) -> list[np.ndarray]:
    """Return the float64 numbers [n] of every replica, whose n may differ. All ranks of a replica pass the same numbers."""
    parts = distributed.gather_bytes(values.astype(np.float64).tobytes(), parallel_state.get_data_parallel_group())
    return [np.frombuffer(part, np.float64).copy() for part in parts]


def merge_replicas(by_sample: dict[int, T], kind: Any) -> dict[int, T]:
    """Return the values of all replicas' samples, of type `kind`, by sample number."""
    return {number: value for part in gather_from_replicas(by_sample, dict[int, kind]) for number, value in part.items()}


def sum_over_replicas(*numbers: float) -> list[float]:
    """Return the sums over replicas. All ranks of a replica pass the same numbers."""
    return _reduce_numbers(numbers, dist.ReduceOp.SUM)


def sum_samples(rows: torch.Tensor, numbers: Sequence[int], count: int) -> torch.Tensor:
    """Return the sums [k] of float64 rows [own, k] over all replicas' samples, added in sample order whichever replica holds a sample.
    `numbers` holds the sample number of each row; `count` is the number of samples over all replicas."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    of_all = torch.zeros(count, rows.shape[1], dtype=torch.float64, device=device)
    of_all[torch.tensor(numbers, dtype=torch.long, device=device)] = rows.to(device)
    dist.all_reduce(of_all, group=parallel_state.get_data_parallel_group())
    return of_all.cpu().sum(0)


def max_over_replicas(number: int) -> int:
    """Return the maximum over replicas."""
    return max_of_replicas([number])[0]


def max_of_replicas(numbers: Sequence[int]) -> list[int]:
    """Return the maximum over replicas of each number."""
    return [int(value) for value in _reduce_numbers(numbers, dist.ReduceOp.MAX)]


def _reduce_numbers(numbers: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(values, operation, group=parallel_state.get_data_parallel_group())
    return values.tolist()


def sum_stages(values: torch.Tensor) -> None:
    """Sum a tensor in place over the pipeline stages of a replica."""
    dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())


def sum_replica(values: torch.Tensor) -> None:
    """Sum a tensor in place over all ranks of a replica."""
    sum_stages(values)
    dist.all_reduce(values, group=parallel_state.get_tensor_and_context_parallel_group())


def sum_stage(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor, on the CPU, over the ranks of a pipeline stage that compute other positions with the same shards."""
    values = values.cuda() if torch.cuda.is_available() else values
    dist.all_reduce(values, group=_stage_group())
    return values.cpu()


def gather_from_stage(value: T, kind: Any) -> list[T]:
    """Return the small value, of type `kind`, of every rank of `sum_stage`."""
    return gather_from_ranks(value, kind, _stage_group())


def gather_from_shards(value: T, kind: Any) -> list[T]:
    """Return the small value, of type `kind`, of every tensor- and pipeline-parallel rank of a replica."""
    return gather_from_ranks(value, kind, parallel_state.get_model_parallel_group())


def get_shard_number() -> int:
    """Return which part of the vocabulary this rank holds."""
    return parallel_state.get_tensor_model_parallel_rank()


def _stage_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _groups() -> tuple[dist.ProcessGroup, ...]:
    return parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group()
