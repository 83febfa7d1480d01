"""Sums over tensor-parallel ranks that travel while the next part of the product is computed.

Under sequence parallelism each rank multiplies for all tokens, and gets the sums of its own. The results' columns are cut into parts: a
part is a product with some of the weight's blocks, which lie together already, and has the numbers of the whole product. While one is
computed the one before is summed. By the tree the bits do not depend on the parts; otherwise the order over ranks is the library's for a
message of that size, so how many parts there are follows from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from parallel.formats import BLOCK

Pending = Callable[[], torch.Tensor]
"""Waits, and returns the sums of this rank's tokens."""
MOST_PARTS = 4
LEAST_TILES = 256
"""Tiles of 128x128 results in a part: about two for each of a Hopper's 132 processors; smaller parts would leave some idle."""


def count_parts(results: torch.Size | tuple[int, int], ranks: int, on_gpu: bool) -> int:
    """Return into how many parts to cut the columns of results [tokens, width]: 4, 2 or 1. A CPU computes what it sends: 1."""
    tokens, width = results
    parts = MOST_PARTS if on_gpu and ranks > 1 else 1
    while parts > 1 and (width % (parts * BLOCK) or tokens * width < parts * LEAST_TILES * BLOCK**2):
        parts //= 2
    return parts


def cut_weight(backend: Any, weight: Any, dim: int, width: int, parts: int) -> list[Any]:
    """Return the parts of a prepared weight, which has the results' `width` columns in its dimension `dim`."""
    size = width // parts
    return [weight] if parts == 1 else [backend.narrow(weight, dim, first, size) for first in range(0, width, size)]


def start_sums(weights: list[Any], multiply: Callable[[Any], torch.Tensor], start: Callable[[torch.Tensor], Pending]) -> Pending:
    """Multiply with one part of a weight after the other, and `start` to sum each product, without waiting for it."""
    pending = [start(multiply(weight)) for weight in weights]
    return pending[0] if len(pending) == 1 else lambda: torch.cat([finish() for finish in pending], -1)


def start_scatter(whole: torch.Tensor, group: Any) -> Pending:
    """Begin to add up [T, ...] over ranks: each gets [T / tp, ...], in the library's order and the dtype of `whole`."""
    whole = whole.contiguous()
    own = whole.new_empty(len(whole) // group.size(), *whole.shape[1:])
    work = dist.reduce_scatter_tensor(own, whole, group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        return own

    return finish
