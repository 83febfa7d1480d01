"""The order of row-parallel sums: a binary tree over blocks of 128 numbers, whose nodes are what tensor-parallel ranks hold. No torch.

`megatron_rl.precision.ops.tree` computes them.
"""

from __future__ import annotations

LEAF = 128
"""Numbers of a row that one leaf sums: a block of the contract."""


def halve(leaves: int) -> int:
    """Return how many of a node's leaves its first half has."""
    return (leaves + 1) // 2


def holds_node(width: int, ranks: int) -> bool:
    """Return whether each of so many ranks holds a node of a sum over `width` numbers."""
    return width % (LEAF * ranks) == 0 and ranks & (ranks - 1) == 0
