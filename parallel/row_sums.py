"""The order of row-parallel sums: a binary tree over blocks of 128 numbers, whose nodes are what tensor-parallel ranks hold. No torch.

`megatron_rl.kernels.sums.reference` computes them.
"""

from __future__ import annotations

LEAF = 128
"""Numbers of a row that one leaf sums: a block of the contract."""
GATHERED_WHOLE = 1 << 14
"""Results up to which ranks send all their partial sums to all: one message for two."""
GPU_TILE = 64
"""Rows and columns of results that a program of `megatron_rl.kernels.sums.triton` computes."""


def halve(leaves: int) -> int:
    """Return how many of a node's leaves its first half has."""
    return (leaves + 1) // 2


def holds_node(width: int, ranks: int) -> bool:
    """Return whether each of so many ranks holds a node of a sum over `width` numbers."""
    return width % (LEAF * ranks) == 0 and ranks & (ranks - 1) == 0


def count_bytes_sent(ranks: int, dtype_bytes: int, scattered: bool, by_tree: bool = True) -> float:
    """Return the bytes that each of a group's ranks sends for one result that all of them get, or, `scattered`, one of them.

    By the tree, FP32 partial sums to the rank that adds them (an all-to-all), and the rounded sum to all (an all-gather). Otherwise by a
    ring's reduce-scatter, or all-reduce, of partial sums that are rounded to the dtype.
    """
    return (ranks - 1) / ranks * ((4 if by_tree else dtype_bytes) + (0 if scattered else dtype_bytes))


def list_merges(leaves: int) -> list[tuple[int, int]]:
    """Return for each leaf, in order, (its level, level of the node that it completes): what to do with one leaf after the other.

    The root's level is ceil(log2(leaves)), so a leaf's is 0 or 1. At most one node of each level waits for its second half: a leaf's sum is
    added to those that wait at its level and above, up to the level that it completes, and waits there.
    """
    return _list_merges(leaves, (leaves - 1).bit_length())


def _list_merges(leaves: int, level: int) -> list[tuple[int, int]]:
    if leaves == 1:
        return [(level, level)]
    merges = _list_merges(halve(leaves), level - 1) + _list_merges(leaves - halve(leaves), level - 1)
    return [*merges[:-1], (merges[-1][0], level)]
