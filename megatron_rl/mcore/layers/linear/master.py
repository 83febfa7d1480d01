"""The FP32 master of a quantized weight, of which each data-parallel replica has a flat slice."""

from __future__ import annotations

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
