"""How values are stored: a dtype for every kind of tensor, and for quantised weights an FP32 scale for each tile of a grid."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
"""Rows and columns of an FP8 weight block, and length of an activation group."""

_DTYPES = {
    "fp8": ("float8_e4m3fn", 1),
    "int8": ("int8", 1),
    "scale": ("float32", 4),
    "fp32": ("float32", 4),
    "bf16": ("bfloat16", 2),
}
"""Kind of a stored tensor -> torch's name of its dtype, bytes per element. The kind `high` is the run's `precision.high`."""


def dtype_name(kind: str, high: str) -> str:
    """Return torch's name of the dtype that stores a kind of values; `high` is "bf16" or "fp32"."""
    return _DTYPES[high if kind == "high" else kind][0]


def element_bytes(kind: str, high: str) -> int:
    """Return the bytes per element of a kind of values; `high` is "bf16" or "fp32"."""
    return _DTYPES[high if kind == "high" else kind][1]


def count_blocks(length: int) -> int:
    """Return the number of blocks that cover `length` elements; the last one may be partial."""
    return -(-length // BLOCK)


@dataclass(frozen=True)
class Scheme:
    """One kind of quantised weight. `rows` x `cols` elements share a scale; with `cols` = 0 a whole row of the checkpoint's tensor does."""

    rows: int
    cols: int
    scale_suffix: str
    """What SGLang appends to a weight's name for the name of its scales."""

    @property
    def whole_rows(self) -> bool:
        """A shard that holds some columns of a row holds the scale of the whole row."""
        return self.cols == 0

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Return rows and columns of the scales of `rows` x `cols` elements."""
        return -(-rows // self.rows), 1 if self.whole_rows else -(-cols // self.cols)


SCHEMES = {"fp8": Scheme(BLOCK, BLOCK, "_scale_inv"), "int8": Scheme(1, 0, "_scale")}
"""By kind of stored tensor."""
