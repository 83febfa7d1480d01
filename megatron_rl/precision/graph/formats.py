"""Reads the precision of a live tensor from the tensor itself: its dtype and, if quantized, the shape and values of its scales."""

import re
from collections.abc import Sequence

import torch

from megatron_rl.precision.graph.graph import TensorPrecision
from parallel.formats import FORMATS


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype (fp32, bf16, e4m3), or torch's own name if there is none."""
    name = str(dtype).removeprefix("torch.")
    for pattern, short in ((r"^float8_(e\dm\d)\w*", r"\1"), (r"^bfloat", "bf"), (r"^float", "fp")):
        name = re.sub(pattern, short, name)
    return name


def unquantized_format(tensor: torch.Tensor) -> TensorPrecision:
    """Return the format of a tensor without scales."""
    return TensorPrecision(dtype_name(tensor.dtype))


def block_format(data: torch.Tensor, scale: torch.Tensor) -> TensorPrecision:
    """Return the format of `data` `[..., N, K]` with one scale per block. Stacked experts count as one matrix each.

    Edge blocks may be partial, so the block is that of the format in `FORMATS` with these dtypes and shapes, or else what the shapes imply
    ("tensor" for a single scale). The scale format is read from the values, or from `FORMATS` if scales are bytes.
    """
    dtype = dtype_name(data.dtype)
    if data.dim() < 2 or scale.dim() < 2:
        return TensorPrecision(dtype, "tensor", scale_format(scale))
    rows, cols, grid = *data.shape[-2:], tuple(scale.shape[-2:])
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in (data, scale))
    candidates = (format for format in FORMATS.values() if format.block and (format.dtype, format.scale_dtype) == dtypes)
    known = next((format for format in candidates if format.scale_grid(rows, cols) == grid), None)
    height, width = known.block if known and known.block else (-(-rows // grid[0]), -(-cols // grid[1]))
    scales = known.scale_format if known and scale.dtype == torch.uint8 else scale_format(scale)
    return TensorPrecision(dtype, f"{height}x{width or cols}", scales)


def channel_format(data: torch.Tensor, scale: torch.Tensor) -> TensorPrecision:
    """Return the format of an INT8 weight, `[N, K]` or in a kernel's order `[K, N]`, with one scale per output channel `[N, 1]`; stacked
    experts are `[E, N, K]` and `[E, N, 1]`. Raise ValueError for other shapes."""
    stacked = data.shape[:-2] == scale.shape[:-2]
    if min(data.dim(), scale.dim()) < 2 or not stacked or scale.shape[-1] != 1 or scale.shape[-2] not in data.shape[-2:]:
        raise ValueError(f"INT8 weights {list(data.shape)} with scales {list(scale.shape)}: must have one scale per output channel")
    return TensorPrecision(dtype_name(data.dtype), "channel", scale_format(scale))


def scale_format(scale: torch.Tensor) -> str:
    """Return "pow2" if every scale is a power of two, else "fp32"; of other scales, their dtype. "invalid" are scales that are not positive
    numbers, with which SGLang starts."""
    if scale.dtype != torch.float32:
        return dtype_name(scale.dtype)
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        return "invalid"
    return "fp32" if bool((scale.view(torch.int32) & 0x7FFFFF).any()) else "pow2"  # bits of the mantissa


def common_format(formats: Sequence[TensorPrecision]) -> TensorPrecision:
    """Return the common format, or one that equals no other format if they differ."""
    distinct = list(dict.fromkeys(formats))
    return distinct[0] if len(distinct) == 1 else TensorPrecision("mixed(" + ", ".join(map(str, distinct)) + ")")
