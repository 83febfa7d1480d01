"""TODO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class MasterSlice:
    """Elements `start` and following of a master [N, K]: `values` float32 [n], maybe none, on this rank; the others on those of `group`."""

    values: torch.Tensor
    edges: tuple[int, ...]
    """The first element of every rank of the group, and the end of the last's."""
    group: Any

    @property
    def start(self) -> int:
        return self.edges[self.group.rank()]

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        """Set the slice to its part of the whole master."""
        self.values.copy_(whole.reshape(-1)[self.start : self.start + self.values.numel()])

    @torch.no_grad()
    def gather(self, shape: torch.Size) -> torch.Tensor:
        """Return the whole master, on every rank. Collective."""
        if self.group.size() == 1:
            return self.values.detach().view(shape)
        whole = torch.zeros(shape, device=self.values.device)
        whole.view(-1)[self.start : self.start + self.values.numel()] = self.values
        dist.all_reduce(whole.view(torch.int32), group=self.group)  # one rank's bits and zeros: exact
        return whole


def flatten_chained(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chained one that have parameters on this rank."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]


def iter_masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (parameter, this rank's slice of its FP32 master) of every parameter that is not FP32 itself and has one here."""
    yield from _iter_pairs(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)
    yield from optimizer.masters


def iter_stepped(optimizer: Any) -> Iterator[tuple[torch.Tensor, MasterSlice]]:
    """Yield every parameter of one optimizer with the slice, maybe empty, that this rank's Adam steps: of itself or of its master."""
    # not by Megatron's `model_param_group_index_map`: where FP32 and 16-bit parameters are mixed, it points to others
    fp32_pairs = _iter_pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    slices = {id(parameter): tensor for parameter, tensor in (*iter_masters(optimizer), *fp32_pairs)}
    for buffer in optimizer.buffers:
        for parameter in buffer.params:
            yield parameter, make_slice(optimizer, buffer, parameter, slices.get(id(parameter)))


def make_slice(optimizer: Any, buffer: Any, parameter: torch.Tensor, values: torch.Tensor | None) -> MasterSlice:
    """Return this rank's slice of a parameter's master, maybe empty: each rank of a group steps an equal part of every bucket."""
    start, end, number = buffer.param_index_map[parameter]
    bucket, group = buffer.buckets[number], optimizer.data_parallel_group
    part = bucket.grad_data.numel() // group.size()
    edges = tuple(min(max(bucket.offset + rank * part - start, 0), end - start) for rank in range(group.size() + 1))
    return MasterSlice(torch.empty(0, device=parameter.device) if values is None else values, edges, group)


def _iter_pairs(groups: Any, others: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the members of two lists of groups side by side."""
    return (pair for members, partners in zip(groups, others, strict=True) for pair in zip(members, partners, strict=True))
