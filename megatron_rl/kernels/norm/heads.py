"""RMSNorm over all heads of a token's query or key, which tensor-parallel ranks share. Each head's squares are added in FP32, then the sums
of the heads in their order, so that bits do not depend on how ranks share the heads.

    statistic = 1 / sqrt(sum of all squares / width + eps)        normed = (x statistic) weight, rounded once to the dtype of x
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.kernels.sums import reference as tree


class SharedHeads(NamedTuple):
    """The ranks of a group, which have equal parts of `heads` heads in order, or copies of one head if they are more."""

    heads: int
    group: Any
    collectives: Any = dist  # the functions of `torch.distributed` for this group

    @property
    def copies(self) -> int:
        """Number of ranks that have the same head."""
        return max(1, self.group.size() // self.heads)

    def cut(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's heads `[own, d]` of a weight `[heads * d]`."""
        parts = min(self.group.size(), self.heads)
        return weight.view(parts, self.heads // parts, -1)[self.group.rank() * parts // self.group.size()]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return values `[t, ranks * own]` of all ranks of this rank's values `[t, own]`."""
        if self.group.size() == 1:
            return own
        gathered = tree.gather(own, self.group, self.collectives)
        return gathered.unflatten(0, (-1, len(own))).transpose(0, 1).flatten(1)


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: SharedHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normed `[t, own, d]`, statistic float32 `[t, 1, 1]`) of a rank's heads x and their weight `[own, d]`, without gradient."""
    values = x.float()
    squares = ranks.gather(values.square().sum(-1))[:, :: ranks.copies].contiguous()
    statistic = torch.rsqrt(squares.sum(-1) / (ranks.heads * x.shape[-1]) + eps)[:, None, None]
    return (values * statistic * weight.float()).to(x.dtype), statistic


class AllHeadsNorm(torch.autograd.Function):
    """The norm of `normalize`. If ranks have copies of a head, the gradients of the copies add up to the head's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: SharedHeads) -> torch.Tensor:
        normed, statistic = normalize(x, weight, eps, ranks)
        ctx.save_for_backward(x, weight, statistic)
        ctx.ranks = ranks
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight, statistic), ranks, dy = ctx.saved_tensors, ctx.ranks, gradient.float()
        normalized, weighted = x.float() * statistic, dy * weight.float()
        products = ranks.gather((weighted * normalized).sum(-1)).sum(-1)[:, None, None] / (ranks.heads * x.shape[-1] * ranks.copies)
        dx = statistic * (weighted - normalized * products)
        return dx.to(x.dtype), (dy * normalized).sum(0).to(weight.dtype), None, None
