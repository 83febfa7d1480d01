"""Query, key and value exchange if there are more tensor-parallel ranks than key-value heads.

Megatron splits the rows of a head group (its queries, key and value) into equal parts for the ranks that share it:

    q1 q2 q3 | q4 k v       two ranks; the first needs q1 q2 k v, the second q3 q4 k v

Megatron's layer would gather all heads on every rank. Here a rank sends only to the ranks of its group, and only what they need. In the
backward pass, gradients travel back and are added in FP32, in rank order.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def exchange_heads(mixed: torch.Tensor, queries: int, dim: int, ranks: int, group: Any) -> torch.Tensor:
    """Return this rank's part of its head group, [..., (queries / ranks + 2) * dim] in the order q, k, v, with gradient.

    Args:
        mixed: [..., (queries + 2) * dim / ranks], this rank's part of `queries` heads of `dim`, a key head and a value head.
        ranks: number of consecutive ranks of `group` that share the head group.
    """
    result: torch.Tensor = _Exchange.apply(mixed, Cut(queries, dim, ranks, group.rank() % ranks), group)
    return result


class Cut:
    """Which columns of a head group each rank sends to each other rank that shares it. `own` is this rank's index among them."""

    def __init__(self, queries: int, dim: int, ranks: int, own: int) -> None:
        self.ranks, self.own, self.width = ranks, own, (queries + 2) * dim // ranks
        self._queries, self._all_queries, self._end = queries // ranks * dim, queries * dim, (queries + 2) * dim

    def columns(self, sender: int, receiver: int) -> list[slice]:
        """Return the columns of the sender's part that the receiver needs, in ascending order."""
        start, end = sender * self.width, (sender + 1) * self.width
        needed = ((receiver * self._queries, (receiver + 1) * self._queries), (self._all_queries, self._end))
        overlaps = ((max(first, start) - start, min(last, end) - start) for first, last in needed)
        return [slice(first, last) for first, last in overlaps if first < last]

    def count(self, sender: int, receiver: int) -> int:
        return sum(part.stop - part.start for part in self.columns(sender, receiver))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, cut: Cut, group: Any) -> torch.Tensor:
        ctx.cut, ctx.group = cut, group
        rows, everyone = mixed.flatten(0, -2), range(cut.ranks)
        parts = [torch.cat([rows[:, part] for part in cut.columns(cut.own, to)] or [rows[:, :0]], -1) for to in everyone]
        received = _swap(parts, [cut.count(source, cut.own) for source in everyone], cut, group)
        return torch.cat(received, -1).unflatten(0, mixed.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cut, rows, everyone = ctx.cut, gradient.flatten(0, -2), range(ctx.cut.ranks)
        parts = list(rows.split([cut.count(source, cut.own) for source in everyone], -1))
        received = _swap(parts, [cut.count(cut.own, to) for to in everyone], cut, ctx.group)
        addends = defaultdict(list)
        for to, part in enumerate(received):
            for column, addend in _split(part, cut.columns(cut.own, to)):
                addends[column.start, column.stop].append(addend)
        total = rows.new_empty(len(rows), cut.width)
        for (start, stop), parts in addends.items():
            _add(parts, total[:, start:stop])
        return total.unflatten(0, gradient.shape[:-1]), None, None


def _add(parts: list[torch.Tensor], result: torch.Tensor) -> None:
    """Write the sum of parts of one shape, added to 0 in FP32 in list order and rounded. A query's gradient has a single part."""
    if len(parts) == 1:
        torch.add(parts[0], 0.0, out=result)
        return
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part
    result.copy_(total)


def _swap(parts: list[torch.Tensor], widths: list[int], cut: Cut, group: Any) -> list[torch.Tensor]:
    """Send `parts` [t, any] to the ranks that share heads; return their parts [t, width]. This rank's own part is kept."""
    first, rows = group.rank() - cut.own, len(parts[cut.own])
    sizes, splits = [0] * group.size(), [0] * group.size()
    for number in range(cut.ranks):
        if number != cut.own:
            sizes[first + number], splits[first + number] = rows * widths[number], parts[number].numel()
    sent = torch.cat([part.flatten() for number, part in enumerate(parts) if number != cut.own])
    flat = sent.new_empty(sum(sizes))
    dist.all_to_all_single(flat, sent, sizes, splits, group=group)
    pieces = flat.split(sizes)[first : first + cut.ranks]
    return [parts[cut.own] if number == cut.own else piece.view(rows, widths[number]) for number, piece in enumerate(pieces)]


def _split(addends: torch.Tensor, columns: list[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield each column slice with its part of `addends`, in which the slices are adjacent."""
    start = 0
    for column in columns:
        width = column.stop - column.start
        yield column, addends[:, start : start + width]
        start += width
