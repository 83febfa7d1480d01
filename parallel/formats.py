"""How quantised weights are stored: a byte per element, and an FP32 scale for each tile of a grid."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
"""Rows and columns of an FP8 weight block, and length of an activation group."""


def count_blocks(length: int) -> int:
    """Number of blocks that cover `length` elements; the last one may be partial."""
    return -(-length // BLOCK)


@dataclass(frozen=True)
class Scheme:
    """One kind of quantised weight. Its tiles have `rows` rows and `cols` columns; 0 columns: whole rows of the checkpoint's tensor."""

    rows: int
    cols: int
    scale_suffix: str
    """What SGLang appends to a weight's name for the name of its scales."""

    @property
    def whole_rows(self) -> bool:
        """A shard that holds some columns of a row holds the scale of the whole row."""
        return self.cols == 0

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns of the scales of `rows` x `cols` elements."""
        return -(-rows // self.rows), 1 if self.whole_rows else -(-cols // self.cols)


SCHEMES = {"fp8": Scheme(BLOCK, BLOCK, "_scale_inv"), "int8": Scheme(1, 0, "_scale")}
"""By the kind of a plan's copies."""
