"""Sums of rounded partial results in the order of ranks (`precision.reduction = "ranks"`).

The K numbers of a row-parallel sum are cut into equal parts (`parallel.row_sums.count_parts`). Each part's product is rounded to the dtype
of the layer. A rank holds the parts that follow those of the rank before, as slices of its own numbers. The parts are added in FP32, one
after the other, and the sum is rounded once: what SGLang's all-reduce does on a GPU, where each rank has one part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.kernels.batch_invariant import invariant_matmul
from megatron_rl.kernels.sums.reference import add_ranks, gather
from parallel.row_sums import GATHERED_WHOLE


def cut(x: torch.Tensor, slices: int) -> Sequence[torch.Tensor]:
    """Return equal slices `[..., K / slices]` of x `[..., K]`, each with the strides of a rank's own tensor, on which the bits of a
    product on a CPU depend."""
    return [x] if slices == 1 else [part.contiguous() for part in x.chunk(slices, -1)]


def multiply_slices(
    x: torch.Tensor, weight: torch.Tensor, slices: int, multiply: Callable[..., torch.Tensor] = invariant_matmul
) -> torch.Tensor:
    """Return the rounded products `[slices, ..., N]` of x `[..., K]` and weight `[N, K]`. `multiply` is the layer's product."""
    return torch.stack([multiply(*pair) for pair in zip(cut(x, slices), cut(weight, slices), strict=True)])


def spread(partials: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return `[ranks, slices, T / ranks, ...]` of a rank's partial results `[slices, T, ...]`: what each rank receives."""
    return partials.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()


def add_received(received: torch.Tensor) -> torch.Tensor:
    """Return the sums `[T / ranks, ...]` of what a rank has received, `[ranks, slices, T / ranks, ...]`."""
    return add_ranks(received.flatten(0, 1))


def reduce(partials: torch.Tensor, group: Any, collectives: Any = dist) -> torch.Tensor:
    """Return the sums `[T, ...]` over the ranks of a group of partial results `[slices, T, ...]`, on every rank. `collectives` has the
    functions of `torch.distributed` for this group."""
    size, rows = group.size(), partials.shape[1]
    if size == 1:
        return add_ranks(partials)
    if partials.numel() <= GATHERED_WHOLE:
        return add_ranks(gather(partials, group, collectives))
    sent = spread(F.pad(partials, (0, 0) * (partials.dim() - 2) + (0, -rows % size)), size)
    collectives.all_to_all_single(received := torch.empty_like(sent), sent, group=group)
    return gather(add_received(received), group, collectives)[:rows]
