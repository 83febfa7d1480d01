"""The order of row-parallel sums: a binary tree over blocks of 128 values, whose nodes tensor-parallel ranks hold, or with
`precision.reduction = "ranks"` one part after another. No torch."""

LEAF = 128  # values that one leaf sums: the width of a block
GATHERED_WHOLE = 1 << 14  # largest number of results for which ranks send all partial sums to all ranks, which saves one message
GPU_TILE = 64  # rows and columns of results that a program of `megatron_rl.kernels.sums.triton` computes


def halve(leaves: int) -> int:
    """Return the number of leaves in the first half of a node."""
    return (leaves + 1) // 2


def holds_node(width: int, ranks: int) -> bool:
    """Return whether each of `ranks` ranks holds a whole node of a sum over `width` values."""
    return width % (LEAF * ranks) == 0 and ranks & (ranks - 1) == 0


def count_parts(trainer_tp: int, engine_tp: int) -> int:
    """Return the number of parts whose rounded results `precision.reduction = "ranks"` adds in order, the same in trainer and engine."""
    return max(trainer_tp, engine_tp)


def count_bytes_sent(ranks: int, dtype_bytes: int, scattered: bool, by_tree: bool = True) -> float:
    """Return the bytes that each rank sends for one result, which all ranks get, or, if `scattered`, one rank. The tree sends FP32 partial
    sums (all-to-all) and the rounded sum (all-gather). Without it, a ring sends partial sums that are rounded to the dtype."""
    return (ranks - 1) / ranks * ((4 if by_tree else dtype_bytes) + (0 if scattered else dtype_bytes))


def list_merges(leaves: int, level: int | None = None) -> list[tuple[int, int]]:
    """Return (level of the leaf, level of the node that it completes) for each leaf in order: the order of additions. The root's `level` is
    ceil(log2(leaves)), so a leaf's level is 0 or 1. At most one node of each level waits for its second half: a leaf's sum is added to the
    waiting nodes at its level and above, up to the level that it completes, and waits there."""
    level = (leaves - 1).bit_length() if level is None else level
    if leaves == 1:
        return [(level, level)]
    merges = list_merges(halve(leaves), level - 1) + list_merges(leaves - halve(leaves), level - 1)
    return [*merges[:-1], (merges[-1][0], level)]
