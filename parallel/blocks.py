"""The FP8 weight block: a 128x128 tile with one scale."""

BLOCK = 128
"""Rows and columns of a weight block, and length of an activation group."""


def blocks_in(length: int) -> int:
    """Number of blocks that cover `length` elements; the last one may be partial."""
    return -(-length // BLOCK)
