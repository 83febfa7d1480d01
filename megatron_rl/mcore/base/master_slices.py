"""Slices of FP32 masters: each data-parallel replica steps a flat slice of every weight's master."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class MasterSlice:
    """This rank's slice of a master [N, K]: `values` float32 [n], possibly empty, from flat element `start`. `group` holds all slices."""

    values: torch.Tensor
    edges: tuple[int, ...]  # first element of every rank's slice, then the end of the last slice
    group: Any

    @property
    def start(self) -> int:
        return self.edges[self.group.rank()]

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        """Copy the slice from the whole master."""
        self.values.copy_(whole.reshape(-1)[self.start : self.start + self.values.numel()])

    @torch.no_grad()
    def gather(self, shape: torch.Size) -> torch.Tensor:
        """Return the whole master on every rank. Collective."""
        if self.group.size() == 1:
            return self.values.detach().view(shape)
        whole = torch.zeros(shape, device=self.values.device)
        whole.view(-1)[self.start : self.start + self.values.numel()] = self.values
        dist.all_reduce(whole.view(torch.int32), group=self.group)  # one rank's bits plus zeros: exact
        return whole


def flatten_chained(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chained optimizer that have parameters on this rank."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]


def iter_masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (parameter, this rank's slice of its FP32 master) for every non-FP32 parameter with a slice on this rank."""
    yield from _iter_pairs(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)
    yield from optimizer.masters


def iter_stepped(optimizer: Any) -> Iterator[tuple[torch.Tensor, MasterSlice]]:
    """Yield every parameter with the slice, possibly empty, that this rank's Adam updates: of its master or of the FP32 parameter
    itself."""
    # Megatron's `model_param_group_index_map` is wrong if FP32 and 16-bit parameters are mixed
    fp32_pairs = _iter_pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    slices = {id(parameter): tensor for parameter, tensor in (*iter_masters(optimizer), *fp32_pairs)}
    for buffer in optimizer.buffers:
        for parameter in buffer.params:
            yield parameter, make_slice(optimizer, buffer, parameter, slices.get(id(parameter)))


def make_slice(optimizer: Any, buffer: Any, parameter: torch.Tensor, values: torch.Tensor | None) -> MasterSlice:
    """Return this rank's slice of a parameter's master: every rank of the group updates an equal part of each bucket."""
    start, end, number = buffer.param_index_map[parameter]
    bucket, group = buffer.buckets[number], optimizer.data_parallel_group
    part = bucket.grad_data.numel() // group.size()
    edges = tuple(min(max(bucket.offset + rank * part - start, 0), end - start) for rank in range(group.size() + 1))
    return MasterSlice(torch.empty(0, device=parameter.device) if values is None else values, edges, group)


def _iter_pairs(groups: Any, others: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the members of two lists of groups in pairs."""
    return (pair for members, partners in zip(groups, others, strict=True) for pair in zip(members, partners, strict=True))
